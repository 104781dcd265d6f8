"""`replayssm check`: what it prints, and that it fails when decode is wrong."""

import pytest
import torch

from replayssm import ops
from replayssm.cli.check import Measured, check_layer, relative_error
from replayssm.cli.decoding import encode, load
from replayssm.cli.record import record
from replayssm.spec import STATE_DTYPES
from tests.cli.conftest import save_model

T, L = 10, 4


@pytest.fixture(scope="module")
def records(saved):
    loaded = load(str(saved), "float32", "cpu")
    return record(loaded, encode(loaded, "some words before", T + 1), T)


def test_command(cli, saved):
    result = cli("check", saved, "--tokens", T, "--ring-len", L, "--json")
    assert result.code == 0, result
    for text in ("relative error after 10 steps, state float32, ring of 4", "worst", "limit", "drift"):
        assert text in result.err
    data = result.json
    assert data["ok"]
    layers, per_layer = 3, 4 * len(STATE_DTYPES) + 1
    assert len(data["measurements"]) == layers * per_layer
    assert f"{layers * per_layer} of {layers * per_layer} measurements within their limits" in result.err
    assert {m["layer"] for m in data["measurements"]} == {0, 1, 3}


def test_worst_row_only(cli, saved):
    out = cli("check", saved, "--tokens", 3, "--layers", "worst").out
    first_words = [line.split()[0] for line in out.splitlines() if line]
    assert "worst" in first_words
    assert "0" not in first_words


def test_kda(cli, tmp_path):
    folder = save_model(tmp_path / "kda", "kimi_linear")
    assert cli("check", folder, "--tokens", 6, "--ring-len", 3).code == 0


def test_refused(refused, saved):
    assert "--tokens 0" in refused("check", saved, "--tokens", 0)
    assert "ring length 99" in refused("check", saved, "--ring-len", 99)
    assert "'nonsense'" in refused("check", "nonsense")
    assert "context" in refused("check", saved, "--tokens", 600)


def test_record_is_what_the_model_did(records, saved):
    assert [layer.index for layer in records] == [0, 1, 3]
    for layer in records:
        assert layer.mixed_qkv.shape == (T, layer.spec.qkv_dim)
        assert layer.a.shape == layer.b.shape == (T, layer.spec.num_v_heads)
        assert layer.state.shape == layer.spec.state_array().shape
        assert layer.state.abs().max() > 0  # the state after the prompt, not an empty one
        assert not torch.equal(layer.mixed_qkv[0], layer.mixed_qkv[-1])


def test_replay_drifts_less_than_packed(records):
    errors = {m.what: m.error for layer in records for m in check_layer(layer, T)}
    for dtype in ("bfloat16", "float16"):
        assert errors[f"{dtype} replay state"] < errors[f"{dtype} packed state"]


@pytest.mark.parametrize("mutation", ["drop_ring", "wrong_gate", "lost_cursor"])
def test_wrong_decode_exceeds_the_limits(records, monkeypatch, mutation):
    if mutation == "drop_ring":
        monkeypatch.setattr(ops, "flush", lambda *args: None)
    elif mutation == "wrong_gate":
        right = ops.fused_recurrent_linear_replayssm_decode
        monkeypatch.setattr(
            ops,
            "fused_recurrent_linear_replayssm_decode",
            lambda x, a, *rest, **options: right(x, a + 0.01, *rest, **options),
        )
    else:
        monkeypatch.setattr(ops, "advance_cursors", lambda *args: None)
    failed = [m for layer in records for m in check_layer(layer, L) if not m.ok]
    assert any(m.what == "float32 replay state" for m in failed)
    assert not any("packed state" in m.what for m in failed)


def test_failure_is_reported(cli, saved, monkeypatch):
    monkeypatch.setattr(ops, "flush", lambda *args: None)
    result = cli("check", saved, "--tokens", T, "--ring-len", L)
    assert result.code == 1
    assert "FAILED layer 0, float32 replay state" in result.out
    assert "exceeds" in result.out


def test_nan_is_never_ok():
    assert not Measured(0, "x", float("nan"), 1.0).ok
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(0.5 / 29.25**0.5)
