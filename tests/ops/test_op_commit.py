"""What follows a window: cursors, conv state, and the strategies that have no ring."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import ops, reference
from tests import tolerance
from tests.decode_case import KINDS, NAN, Pool, Tokens, int32, layer
from tests.step_case import same
from tests.verify_case import empty_out, inputs, limits, verify

KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS, SLOTS = 3, int32(4, -1, 1, 5, 0)
LENGTHS, ACCEPTED = int32(3, 2, 4, 1, 4), int32(2, 2, 0, 1, 4)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 64), st.integers(0, 7), st.booleans())
def test_cursors(data, ring_len, rows, with_force):
    cursors = data.draw(st.lists(st.integers(0, ring_len), min_size=7, max_size=7))
    slots = [-1 if data.draw(st.booleans()) else s for s in data.draw(st.permutations(range(7)))[:rows]]
    lengths = [data.draw(st.integers(0, ring_len)) for _ in slots]
    kept = [data.draw(st.integers(0, m)) for m in lengths]
    force = [data.draw(st.integers(0, 2)) for _ in slots] if with_force else None
    want = list(cursors)
    for i, slot in enumerate(slots):
        if slot >= 0:
            flag = bool(force and force[i])
            want[slot] = reference.commit_cursor(cursors[slot], lengths[i], kept[i], ring_len, flag)
    cursor = int32(*cursors)
    flags = None if force is None else int32(*force)
    ops.commit_cursors(cursor, int32(*slots), ring_len, int32(*lengths), int32(*kept), flags)
    assert cursor.tolist() == want
    if not with_force and all(m < ring_len for m in lengths):
        assert max(want[s] for s in [*slots, 0] if s >= 0) < max(ring_len, max(cursors) + 1)


class Packed:
    """Layers without a ring, and their windows; states [layers, slots, HV, V, K], NaN where no row is."""

    def __init__(self, kind, tokens=4, strided=False, **options):
        self.lay = layer(kind, **options)
        lay, rows = self.lay, len(SLOTS)
        self.slots, self.lengths, self.accepted = (x.to(lay.device) for x in (SLOTS, LENGTHS, ACCEPTED))
        self.windows = [inputs(lay, rows, tokens, seed=i) for i in range(LAYERS)]
        self.start = torch.stack([lay.state(rows, seed=i) for i in range(LAYERS)])
        wide = torch.full((LAYERS, 6, 2, *self.start.shape[2:]), NAN, dtype=lay.state_dtype, device=lay.device)
        self.state = wide[:, :, 1] if strided else wide[:, :, 1].contiguous()
        live = SLOTS >= 0
        self.state[:, self.slots[live.to(lay.device)].long()] = self.start[:, live.to(lay.device)]
        for window in self.windows:
            for x in window:
                for row, length in enumerate(LENGTHS.tolist()):
                    x[row, length if SLOTS[row] >= 0 else 0 :] = NAN

    def verify(self, snapshots=None):
        lay, outs = self.lay, []
        before = self.state.clone()
        for i, window in enumerate(self.windows):
            out = empty_out(lay, *window[0].shape[:2])
            ops.fused_recurrent_linear_packed_verify(
                *window, lay.A_log, lay.dt_bias, None, self.state[i], None if snapshots is None else snapshots[i], out,
                self.slots, self.lengths, **lay.gate_args,
            )  # fmt: skip
            outs.append(out)
        assert same(self.state, before), "the states must stay as they are"
        return torch.stack(outs).cpu()

    def truth(self, i, row, length):
        """Outputs [length, HV, V] and the state after them, fp64."""
        start = self.start[i, row : row + 1]
        if not length:
            return torch.zeros(0, *start.shape[1:3]), start[0].double()
        tokens = Tokens(*(x[row : row + 1, :length].transpose(0, 1) for x in self.windows[i]))
        out, state = self.lay.serial(start, tokens)
        return out[:, 0], state[0]

    def check_outputs(self, outs):
        limit = limits(self.lay, 4)[0]
        for i, (row, slot) in itertools.product(range(LAYERS), enumerate(SLOTS.tolist())):
            length = int(LENGTHS[row]) if slot >= 0 else 0
            tolerance.assert_close(outs[i, row, :length], self.truth(i, row, length)[0], limit, f"layer {i} row {row}")
            assert not outs[i, row, length:].any()

    def check_states(self, before):
        limit = tolerance.state(self.lay.spec.head_k_dim, 4, self.lay.state_dtype)
        after, before = self.state.cpu(), before.cpu()
        for i, (row, slot) in itertools.product(range(LAYERS), enumerate(SLOTS.tolist())):
            if slot < 0:
                continue
            kept = int(ACCEPTED[row])
            tolerance.assert_close(after[i, slot], self.truth(i, row, kept)[1].cpu(), limit, f"layer {i} row {row}")
            if kept:
                before[i, slot] = after[i, slot]
        assert same(after, before), "a state that nobody changes was written"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("layered", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_snapshots(kind, state_dtype, layered, strided):
    case = Packed(kind, strided=strided, state_dtype=state_dtype)
    snapshots = torch.full((LAYERS, len(SLOTS), 4, *case.state.shape[2:]), NAN, dtype=state_dtype)
    case.check_outputs(case.verify(snapshots))
    for row, slot in enumerate(SLOTS.tolist()):
        length = int(LENGTHS[row]) if slot >= 0 else 0
        assert bool(snapshots[:, row, length:].isnan().all())
        for t in range(length):
            limit = tolerance.state(12, 4, state_dtype)
            tolerance.assert_close(snapshots[1, row, t], case.truth(1, row, t + 1)[1], limit, f"row {row} token {t}")
    before = case.state.clone()
    if layered:
        ops.commit_snapshot(case.state, snapshots, SLOTS, ACCEPTED)
    else:
        for i in range(LAYERS):
            ops.commit_snapshot(case.state[i], snapshots[i], SLOTS, ACCEPTED)
    case.check_states(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("layered", [True, False])
def test_kv_replay(kind, state_dtype, layered):
    case = Packed(kind, state_dtype=state_dtype, strided=layered, io=torch.bfloat16)
    case.check_outputs(case.verify())
    before, lay = case.state.clone(), case.lay
    if layered:
        stacked = [torch.stack(x) for x in zip(*case.windows, strict=True)]
        weights = [x.expand(LAYERS, *x.shape) for x in (lay.A_log, lay.dt_bias)]
        ops.commit_kv_replay(*stacked, *weights, case.state, SLOTS, ACCEPTED, **lay.gate_args)
    else:
        for i, window in enumerate(case.windows):
            ops.commit_kv_replay(
                *window, lay.A_log, lay.dt_bias, case.state[i], SLOTS, ACCEPTED, **lay.gate_args
            )  # fmt: skip
    case.check_states(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [4, 8])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_fold_of_all_layers(kind, ring_len, state_dtype):
    """A window on an empty ring, as short as T, then its records into the states: tokens of a row side by side."""
    case = Packed(kind, ring_len=ring_len, state_dtype=state_dtype)
    ring = [
        torch.full((LAYERS, *x.shape), NAN, dtype=torch.float32) for x in case.lay.spec.ring_arrays(ring_len, 6)
    ]  # fmt: skip
    before, outs = case.state.clone(), []
    for i, window in enumerate(case.windows):
        pool = Pool(case.lay, 6)
        pool.initial_state, pool.d_cache, pool.k_cache, pool.g_cache = (x[i] for x in (case.state, *ring))
        outs.append(verify(case.lay, pool, window, SLOTS, int32(0, 9, 0, 0, 0), LENGTHS))
    case.check_outputs(torch.stack(outs))
    assert same(case.state, before), "an empty ring must leave its state as it is"
    ops.commit_fold(case.state, *ring, SLOTS, ACCEPTED, case.lay.l2norm)
    case.check_states(before)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
def test_conv_windows_roll_back(width, extra, channels_last, tokens, dtypes):
    """Two windows in turn, each kept in part, on two layers; then plain updates go on from what was kept."""
    io, held = dtypes
    gen = torch.Generator().manual_seed(width)
    state = torch.randn(2, 6, 33, width - 1 + extra, generator=gen).to(held)
    state = state.mT.contiguous().mT if channels_last else state
    weight, bias = torch.randn(33, width, generator=gen).to(io), torch.randn(33, generator=gen)
    serial, slots = [x.clone() for x in state], int32(3, -1, 0, 5)
    limit = tolerance.output(width, 0, io)
    for lengths, accepted in (([tokens, 1, 1, tokens], [0, 1, 1, tokens]), ([tokens] * 4, [tokens, 0, 1, 0])):
        x = torch.randn(2, 4, tokens, 66, generator=gen).to(io)[..., ::2]
        for row, length in enumerate(lengths):
            x[:, row, length:] = NAN
        x[:, 1] = NAN
        before = state.clone()
        for i in range(2):
            y = ops.causal_conv_verify(x[i], state[i], weight, bias if extra else None, slots, int32(*lengths))
            want = reference.causal_conv_verify(
                x[i], before[i], weight, bias if extra else None, slots, int32(*lengths)
            )  # fmt: skip
            tolerance.assert_close(y, want, limit, "y")
            assert not y[1].any()
            assert all(not y[row, length:].any() for row, length in enumerate(lengths))
        assert same(state, before), "verify must leave the windows as they are"
        ops.commit_conv(state, x, slots, int32(*accepted))
        for i in range(2):
            want = reference.commit_conv(serial[i], x[i], slots, int32(*accepted))
            for row, slot in enumerate(slots.tolist()):
                for t in range(accepted[row] if slot >= 0 else 0):
                    ops.causal_conv_update(x[i, row : row + 1, t], serial[i], weight, None, int32(slot))
            assert same(state[i], serial[i]), "as if the tokens that were kept had come one by one"
            assert same(state[i], want)


def test_conv_output_of_its_own_dtype_and_activation():
    state, weight = torch.randn(3, 8, 3), torch.randn(8, 4)
    x, out = torch.randn(2, 3, 8), torch.full((2, 5, 8), NAN)[:, 1:4]
    got = ops.causal_conv_verify(x, state, weight, None, int32(2, 0), int32(3, 2), None, out)
    assert got is out
    want = reference.causal_conv_verify(x, state, weight, None, int32(2, 0), int32(3, 2), None)
    tolerance.assert_close(out, want, tolerance.output(4, 0), "y")
    assert bool(out._base[:, [0, 4]].isnan().all())


@KIND
def test_empty_batches(kind):
    lay = layer(kind)
    window, pool, none = inputs(lay, 0, 4), Pool(lay, 2, 0.5), int32()
    before = [x.clone() for x in pool.tensors]
    snapshots = torch.empty(0, 4, 6, 20, 12)
    weights = lay.A_log, lay.dt_bias
    out = ops.fused_recurrent_linear_packed_verify(
        *window, *weights, None, pool.initial_state, snapshots, empty_out(lay, 0, 4), none, none, **lay.gate_args
    )
    assert out.shape == (0, 4, 6, 20)
    ops.commit_snapshot(pool.initial_state, snapshots, none, none)
    ops.commit_kv_replay(*window, *weights, pool.initial_state, none, none, **lay.gate_args)
    ops.commit_fold(*pool.tensors, none, none)
    ops.commit_cursors(pool.cursor, none, 8, none, none)
    conv = torch.ones(2, 33, 3)
    assert ops.causal_conv_verify(torch.empty(0, 4, 33), conv, torch.ones(33, 4), None, none, none).shape == (0, 4, 33)
    ops.commit_conv(conv, torch.empty(0, 4, 33), none, none)
    assert all(same(x, y) for x, y in zip(pool.tensors, before, strict=True))


def test_traffic():
    lay, slots = layer("gdn", ring_len=8), int32(3, -1, 1)
    window, pool = inputs(lay, 3, 4), Pool(lay, 5, 0.5)
    size, record = 6 * 20 * 12 * 4, 6 * 20 * 4 + 2 * 12 * 4 + 6 * 4
    with ops.count_traffic() as traffic:
        verify(lay, pool, window, slots, int32(5, 99, 2), int32(3, 4, 4))
    assert tuple(traffic.totals()) == (2 * size, size, 7 * record, 7 * record, 2, 7, 1)
    snapshots = torch.zeros(3, 4, 6, 20, 12)
    for kept, written in ((snapshots, 7 * size), (None, 0)):
        with ops.count_traffic() as traffic:
            ops.fused_recurrent_linear_packed_verify(
                *window, lay.A_log, lay.dt_bias, None, pool.initial_state, kept, empty_out(lay, 3, 4), slots,
                int32(3, 4, 4),
            )  # fmt: skip
        assert tuple(traffic.totals()) == (2 * size, written, 0, 0, 2, 0, 0)
    with ops.count_traffic() as traffic:
        ops.commit_snapshot(pool.initial_state, snapshots, slots, int32(0, 2, 3))
        ops.commit_kv_replay(*window, lay.A_log, lay.dt_bias, pool.initial_state, slots, int32(0, 2, 3))
    assert tuple(traffic.totals()) == (2 * size, 2 * size, 0, 0, 0, 0, 0)
