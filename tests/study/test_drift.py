"""Drift of one layer: the truth is the serial recurrence, marks disturb nothing, errors are what they are called."""

import pytest
import torch

from replayssm import reference
from replayssm.spec import STATE_DTYPES
from replayssm.study import drift
from replayssm.study.layer import TIME_CONSTANTS, Layer, relative
from replayssm.study.setting import RING_LENGTHS, ROUNDED, Setting, drift_settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["gdn", "kda"])
def layer(request):
    return Layer(request.param, 100, CPU)


def test_the_truth_is_one_serial_run(layer):
    mixed, a, b = (x.transpose(0, 1) for x in layer.tokens)
    start = layer.empty_state(layer.rows)
    out, state = reference.serial(mixed, a, b, *layer.gates, None, start, is_kda=layer.kind == "kda")
    outs, states = layer.truth
    assert torch.equal(outs, out.transpose(0, 1))
    assert list(states) == [64, 100]
    assert torch.equal(states[100], state)


def test_rows_forget_as_their_names_say(layer):
    _, a, _ = layer.tokens
    decay = -torch.nn.functional.softplus(a.double())
    for name, steps in TIME_CONSTANTS.items():
        assert -1.3 < float(decay[:, layer.rows_of(name)].mean()) * steps < -0.8


@pytest.mark.parametrize("setting", [Setting("packed"), *(Setting("replay", ring_len=n) for n in (1, 8, 64))])
def test_an_fp32_state_stays_near_the_truth(layer, setting):
    for row in drift.drift(layer, [setting]):
        assert row["state_error"] < 100 * 2**-23
        assert row["output_error"] < 100 * 2**-23


def test_marks_disturb_nothing(layer, monkeypatch):
    """Mark 64 lies within a ring of 48, and its state is folded for the mark alone."""
    setting = Setting("replay", ring_len=48)
    outs, states = drift.run(layer, setting)
    assert relative(states[64], layer.truth[1][64]) < 1e-5
    monkeypatch.setitem(layer.__dict__, "marks", [100])
    alone, last = drift.run(layer, setting)
    assert torch.equal(outs, alone)
    assert torch.equal(states[100], last[100])


def test_errors_are_of_their_rows_and_steps(layer):
    """A wrong number in one row shows there, from its step on, and nowhere else."""
    outs, states = layer.truth
    outs, states = outs.clone(), {mark: state.clone() for mark, state in states.items()}
    slow = layer.rows_of("slow")
    outs[80, slow] *= 2
    states[100][slow] *= 1.5
    rows = {(row["decay"], row["steps"]): row for row in layer.errors(outs, states)}
    assert rows["slow", 100]["state_error"] == pytest.approx(0.5)
    assert rows["slow", 100]["output_error"] > 0.01
    clean = [row for at, row in rows.items() if at != ("slow", 100)]
    assert len(clean) == 3
    assert all(row["state_error"] == row["output_error"] == 0 for row in clean)


def test_an_old_error_fades(layer):
    left = {(row["decay"], row["steps"]): row["left"] for row in drift.forgetting(layer)}
    assert left["slow", 64] > left["slow", 100] > 0.1
    assert left["fast", 64] < 1e-2


def test_what_is_varied():
    settings = drift_settings()
    assert len(set(settings)) == len(settings)
    exact = [s for s in settings if s.operands == "exact"]
    assert len(exact) == len(STATE_DTYPES) * (1 + len(RING_LENGTHS))
    assert {s.operands for s in settings} == {"exact", *ROUNDED}
