"""The serial recurrence by hand, and replay, flush and verify of the oracle against it, all in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from replayssm import reference
from tests import tolerance
from tests.decode_case import KINDS, int32, layer

FP64 = 1e-11  # a few hundred operations at 2e-16 each, with room


def pools(lay, slots, state):
    """fp64 pools, NaN where nothing was written."""
    ring = lay.spec.ring_arrays(lay.ring_len, slots)
    return [state.double(), *(torch.full(a.shape, math.nan, dtype=torch.float64) for a in ring)]


def run_replay(lay, tensors, tokens, slots, cursors, force=None):
    """All tokens through the oracle's replay; returns the outputs, the pools and the cursors."""
    outs = []
    for t in range(tokens.mixed_qkv.shape[0]):
        pos = int32(*(cursors[s] if s >= 0 else 0 for s in slots.tolist()))
        flag = None if force is None else force[t]
        out, tensors = reference.replay_decode(
            *tokens[t], lay.A_log, lay.dt_bias, None, *tensors, slots, pos, flag, **lay.gate_args
        )
        outs.append(out[:, 0])
        for row, s in enumerate(slots.tolist()):
            if s >= 0:
                forced = bool(flag is not None and flag[row])
                cursors[s] = reference.advance_cursor(cursors[s], lay.ring_len, forced)
    return torch.stack(outs), tensors, cursors


def test_two_steps_by_hand():
    """H = HV = 1, K = 2, V = 1, no norm: every number can be checked on paper."""
    A_log, dt_bias = torch.tensor([0.0]), torch.tensor([0.0])
    a = torch.full((1, 2, 1), math.log(math.expm1(math.log(2.0))))  # softplus gives log 2: decay 1/2
    b = torch.zeros(1, 2, 1)  # beta 1/2
    mixed = torch.tensor([[[1.0, 0.0, 1.0, 0.0, 4.0], [1.0, 1.0, 0.0, 2.0, 2.0]]])  # q, k, v
    out, state = reference.serial(
        mixed, a, b, A_log, dt_bias, 1.0, torch.tensor([[[[2.0, 2.0]]]]), use_qk_l2norm_in_kernel=False
    )
    # step 1: S⁻ = [1, 1], d = (4 - 1)/2 = 1.5, S = [2.5, 1], o = 2.5
    # step 2: S⁻ = [1.25, 0.5], d = (2 - 1)/2 = 0.5, S = [1.25, 1.5], o = 2.75
    assert out.flatten().tolist() == pytest.approx([2.5, 2.75])
    assert state.flatten().tolist() == pytest.approx([1.25, 1.5])


def test_value_heads_read_their_key_head():
    lay = layer("gdn", (2, 4, 6, 3))
    tokens, state = lay.tokens(1, 1), lay.state(1)
    lay.A_log.fill_(-math.inf)
    tokens.mixed_qkv[..., 3 * 6 : 4 * 6] = 0  # key head 1
    _, final = lay.serial(state, tokens)
    assert [torch.equal(final[0, hv], state[0, hv].double()) for hv in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_serial(kind):
    lay = layer(kind)
    tokens, state = lay.tokens(9, 3), lay.state(5)
    pool, slots, outs = state.double(), int32(4, -1, 0), []
    for t in range(9):
        out, pool = reference.packed_decode(*tokens[t], lay.A_log, lay.dt_bias, None, pool, slots, **lay.gate_args)
        outs.append(out[:, 0])
    live = [0, 2]
    want, final = lay.serial(state[[4, 0]], type(tokens)(*(x[:, live] for x in tokens[:])))
    tolerance.assert_close(torch.stack(outs)[:, live], want, FP64)
    tolerance.assert_close(pool[[4, 0]], final, FP64)
    assert not torch.stack(outs)[:, 1].any()
    assert torch.equal(pool[1:4], state[1:4].double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [1, 2, 5, 16])
def test_replay_equals_serial(kind, ring_len):
    lay, steps, slots = layer(kind, ring_len=ring_len), 2 * ring_len + 3, int32(3, 0, -1)
    tokens, state = lay.tokens(steps, 3), lay.state(4)
    force = (torch.rand(steps, 3, generator=torch.Generator().manual_seed(0)) < 0.15).int()
    out, tensors, cursors = run_replay(lay, pools(lay, 4, state), tokens, slots, [0] * 4, force)
    want, final = lay.serial(state[[3, 0]], type(tokens)(*(x[:, :2] for x in tokens[:])))
    tolerance.assert_close(out[:, :2], want, FP64, "output")
    pos = int32(cursors[3], cursors[0])
    flushed = reference.flush(*tensors, slots[:2], pos)
    tolerance.assert_close(flushed[[3, 0]], final, FP64, "flushed")
    copy = reference.materialize(*tensors, slots[:2], pos, torch.zeros(2, *state.shape[1:]), int32(1, -1))
    tolerance.assert_close(copy[1], final[0], tolerance.eps(torch.float32), "fp32 copy")
    assert not copy[0].any()
    assert torch.equal(tensors[0][1:3], state[1:3].double())


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_strong_decay_and_infinite_gates(kind):
    lay = layer(kind, ring_len=8)
    tokens, state = lay.tokens(20, 1), lay.state(1)
    tokens.a[::3] = 40.0
    tokens.a[5] = math.inf
    out, tensors, cursors = run_replay(lay, pools(lay, 1, state), tokens, int32(0), [0])
    want, final = lay.serial(state, tokens)
    tolerance.assert_close(out, want, FP64)
    tolerance.assert_close(reference.flush(*tensors, int32(0), int32(*cursors)), final, FP64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", range(1, 9))
def test_verify_and_commit_for_every_cursor_and_acceptance(kind, window):
    """A window of drafts at each cursor; each acceptance 0 … window; then two plain steps read what was left."""
    lay = layer(kind, (1, 2, 6, 4), ring_len=8)
    length, tokens, state = lay.ring_len, lay.tokens(20, 1), lay.state(1)
    rows = lambda start, stop: type(tokens)(*(x[start:stop] for x in tokens[:]))  # noqa: E731
    slot = int32(0)
    for cursor in range(length):
        _, tensors, _ = run_replay(lay, pools(lay, 1, state), rows(0, cursor), slot, [0]) if cursor else (
            None, pools(lay, 1, state), None
        )  # fmt: skip
        draft = [x.transpose(0, 1) for x in rows(cursor, cursor + window)[:]]
        out, pending = reference.verify(
            *draft, lay.A_log, lay.dt_bias, None, *tensors, slot, int32(cursor), **lay.gate_args
        )
        want, _ = lay.serial(state, rows(0, cursor + window))
        tolerance.assert_close(out[0], want[cursor:, 0], FP64, f"verify at {cursor}")
        for accepted in range(window + 1):
            pos, after = reference.commit(pending, int32(accepted), *tensors, slot, int32(cursor))
            total = cursor + accepted
            assert pos.tolist() == [0 if total >= length else total]
            history = rows(0, total)
            if total:
                truth = lay.serial(state, history)[1]
            else:
                truth = state.double()
            tolerance.assert_close(reference.flush(*after, slot, pos), truth, FP64, f"state {cursor}+{accepted}")
            follow = rows(18, 20)  # tokens that were not in the window
            got, _, _ = run_replay(lay, after, follow, slot, pos.tolist())
            want_follow, _ = lay.serial(truth, follow)
            tolerance.assert_close(got, want_follow, FP64, f"after {cursor}+{accepted}")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_verify_with_strong_decay_and_padding(kind):
    lay = layer(kind, ring_len=8)
    tokens, state = lay.tokens(6, 2), lay.state(1)
    tokens.a[1], tokens.a[3] = 40.0, math.inf
    out, pending = reference.verify(
        *(x.transpose(0, 1) for x in tokens[:]), lay.A_log, lay.dt_bias, None, *pools(lay, 1, state),
        int32(-1, 0), int32(0, 0), **lay.gate_args,
    )  # fmt: skip
    want, final = lay.serial(state, type(tokens)(*(x[:, 1:] for x in tokens[:])))
    tolerance.assert_close(out[1], want[:, 0], FP64)
    assert not out[0].any()
    pos, after = reference.commit(pending, int32(3, 6), *pools(lay, 1, state), int32(-1, 0), int32(5, 0))
    assert pos.tolist() == [0, 6]
    tolerance.assert_close(reference.flush(*after, int32(0), int32(6)), final, FP64)


def test_a_committed_window_that_fills_the_ring_then_a_short_one_then_a_plain_step():
    """Cursor 14 of 16, window 4: three accepted fold everything; one accepted appends; then one plain token."""
    lay = layer("gdn", (1, 2, 6, 4), ring_len=16)
    tokens, state, slot = lay.tokens(24, 1), lay.state(1), int32(0)
    part = lambda start, stop: type(tokens)(*(x[start:stop] for x in tokens[:]))  # noqa: E731
    _, tensors, cursors = run_replay(lay, pools(lay, 1, state), part(0, 14), slot, [0])
    done = 14
    for accepted, cursor in ((3, 0), (1, 1)):
        draft = [x.transpose(0, 1) for x in part(done, done + 4)[:]]
        pos = int32(*cursors)
        _, pending = reference.verify(*draft, lay.A_log, lay.dt_bias, None, *tensors, slot, pos)
        new, tensors = reference.commit(pending, int32(accepted), *tensors, slot, pos)
        cursors, done = new.tolist(), done + accepted
        assert cursors == [cursor]
    out, _, _ = run_replay(lay, tensors, part(done, done + 1), slot, cursors)
    want, _ = lay.serial(state, part(0, done + 1))
    tolerance.assert_close(out[0], want[-1], FP64)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_on_a_ring_equal_serial(kind):
    """Rows of 0 to T tokens, kept in part, forced flushes and full rings: outputs, cursors and flushed states."""
    lay, slots, length = layer(kind, (1, 2, 6, 4), ring_len=5), int32(3, -1, 0), 5
    gen, stream, state = torch.Generator().manual_seed(4), lay.tokens(110, 3), lay.state(4)
    tensors, cursors, done = pools(lay, 4, state), [0] * 4, [0, 0, 0]
    for _ in range(20):
        m = torch.randint(0, 6, (3,), generator=gen).int()
        force = (torch.rand(3, generator=gen) < 0.2).int()
        window = [
            torch.stack([x[done[row] : done[row] + 5, row] for row in range(3)]) for x in stream[:]
        ]  # fmt: skip
        pos = int32(*(cursors[s] if s >= 0 else 99 for s in slots.tolist()))
        out, tensors = reference.ring_verify(
            *window, lay.A_log, lay.dt_bias, None, *tensors, slots, pos, m, force, **lay.gate_args
        )
        assert not out[1].any()
        for row, slot in ((0, 3), (2, 0)):
            seen, count = done[row], int(m[row])
            part = type(stream)(*(x[: seen + count, row : row + 1] for x in stream[:]))
            start = state[slot : slot + 1]
            if count:
                tolerance.assert_close(out[row, :count], lay.serial(start, part)[0][seen:, 0], FP64, "outputs")
            assert not out[row, count:].any()
            kept = int(torch.randint(0, count + 1, (), generator=gen))
            cursors[slot] = reference.commit_cursor(cursors[slot], count, kept, length, bool(force[row]))
            done[row] += kept
            flushed = reference.flush(*tensors, int32(slot), int32(cursors[slot]))[slot]
            if done[row]:
                part = type(stream)(*(x[: done[row], row : row + 1] for x in stream[:]))
                tolerance.assert_close(flushed, lay.serial(start, part)[1][0], FP64, "state")
    assert max(done) > 12
