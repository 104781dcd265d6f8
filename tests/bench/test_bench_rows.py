"""Checks that can fail, periods that are whole."""

import pytest
import torch

from replayssm import ops
from replayssm.bench import timing
from replayssm.bench.case import Shape, check_case, timed_case
from replayssm.bench.check import check
from replayssm.bench.kernels import Own
from replayssm.bench.roofline import step_bytes
from replayssm.spec import LayerSpec

KINDS = {
    "gdn": LayerSpec("gdn", 2, 4, 16, 24, beta_scale=2.0),
    "kda": LayerSpec("kda", 2, 2, 16, 24),
    "kda-bounded": LayerSpec("kda", 1, 2, 16, 24, lower_bound=-5.0),
}


def shape(kind="gdn", batch=5, ring_len=4, state="float32", io="bfloat16"):
    return Shape(KINDS[kind], batch, ring_len, state, io, torch.device("cpu"))


def own(route):
    return lambda case: Own(case, route)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["packed", "replay"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 5])
def test_our_kernels_pass(kind, route, state, batch):
    assert check(shape(kind, batch, state=state), route, own(route)).ok


@pytest.mark.parametrize("ring_len", [1, 2, 3, 4, 5, 16])
def test_every_ring_length_passes_and_reaches_its_end(ring_len):
    case = check_case(shape(ring_len=ring_len))
    assert bool((case.write_pos == ring_len - 1).any(0).all())
    assert ring_len == 1 or bool((case.last > 0)[::2].all())
    assert check(shape(ring_len=ring_len), "replay", own("replay")).ok


class Damaged(Own):
    """Replay decode with one thing wrong."""

    how = ""

    def step(self, t, copy):
        if self.how == "no flush" and bool((self.case.write_pos[t] == self.case.shape.ring_len - 1).any()):
            state = self.case.state[copy].clone()
            super().step(t, copy)
            self.case.state[copy].copy_(state)
            return
        super().step(t, copy)
        if self.how == "output":
            self.case.out[copy].mul_(1.02)
        if self.how == "nan":
            self.case.out[copy][-1, 0, 0, 0] = float("nan")

    def state(self, copy):
        if self.how == "no last flush":
            return self.case.state[copy][self.case.slots.long()]
        return super().state(copy)


@pytest.mark.parametrize("how", ["", "no flush", "output", "nan", "no last flush"])
def test_damage_is_seen(how):
    runner = type("Runner", (Damaged,), {"how": how})
    assert check(shape(), "replay", lambda case: runner(case, "replay")).ok == (how == "")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("batch", [3, 4, 9])
def test_a_timed_run_is_whole_periods_with_their_flushes(kind, batch):
    at = shape(kind, batch, ring_len=4)
    case = timed_case(at, copies=2)
    assert torch.equal(case.last, case.write_pos[0])  # so that a period can be repeated
    assert [sorted(column) for column in case.write_pos.T.tolist()] == [[0, 1, 2, 3]] * batch
    with ops.count_traffic() as counted:
        timed = timing.measure(Own(case, "replay"), case, quick=True)
    totals, periods = counted.totals(), len(timed.samples)
    assert timed.steps == 4 * 2
    assert totals.rows == periods * timed.steps * batch
    assert totals.flushes == periods * 2 * batch
    assert totals.appends == 3 * totals.flushes
    moved = step_bytes(at.spec, "replay", batch, 4, "float32", "bfloat16") * periods * timed.steps
    assert sum(totals[:4]) == pytest.approx(moved, rel=1e-12)


def test_rows_are_spread_over_the_phases():
    case = timed_case(shape(batch=8), copies=1)
    for positions in case.write_pos.tolist():
        assert sorted(positions) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_copies_exceed_the_working_set():
    at = shape(batch=1)
    for wanted in (0, at.state_bytes - 1, at.state_bytes, 10 * at.state_bytes):
        copies = timing.copies_for(at, wanted)
        assert copies * at.state_bytes > wanted >= (copies - 1) * at.state_bytes
