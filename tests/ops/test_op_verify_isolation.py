"""What a row of a window does not own never reaches it, and it reaches nothing else; extreme gates; long runs."""

from __future__ import annotations

import math
import random

import pytest
import torch

from replayssm import ops
from replayssm.errors import SlotError
from tests import tolerance
from tests.decode_case import NAN, Pool, int32, layer
from tests.step_case import bits, filled_pool, same
from tests.verify_case import Run, empty_out, inputs, limits, step, verify

KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])
INF = float("inf")
SLOTS, CURSORS, LENGTHS = int32(4, -1, 1, 2, 0), int32(2, 99, 5, 0, 3), int32(3, 4, 4, 0, 1)


def framed(x, fill, dead_from):
    """`x` inside memory of `fill`, as are its dead tokens."""
    wide = torch.full((x.shape[0] + 2, x.shape[1] + 1, *x.shape[2:-1], x.shape[-1] + 5), fill, dtype=x.dtype)
    inner = wide[1:-1, :-1, ..., 2:-3]
    inner.copy_(x)
    for row, t in enumerate(dead_from):
        inner[row, t:] = fill
    return inner


@KIND
@pytest.mark.parametrize("poison", [NAN, 1e30])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_poison_changes_no_bit(kind, poison, state_dtype):
    """Free slots, dead records, dead tokens, the old output and the memory around the inputs: poison, or zeros."""
    lay = layer(kind, ring_len=7, state_dtype=state_dtype)
    dead_from = [int(m) if s >= 0 else 0 for s, m in zip(SLOTS, LENGTHS, strict=True)]
    results = []
    for fill in (poison, 0.0):
        pool = filled_pool(lay, SLOTS, CURSORS.clamp_max(7), 6, fill)
        window = tuple(framed(x, fill, dead_from) for x in inputs(lay, 5, 4))
        buffer = torch.full((7, 5, 6, 20), fill)
        out = verify(lay, pool, window, SLOTS, CURSORS, LENGTHS, out=buffer[1:6, 1:])
        assert same(buffer[[0, 6]], torch.full_like(buffer[:2], fill)), "wrote outside the output"
        assert same(buffer[1:6, 0], torch.full_like(buffer[1:6, 0], fill)), "wrote outside the output"
        ends = int32(5, 99, 4, 0, 4)
        state = torch.full_like(pool.initial_state, fill)
        ops.materialize(*pool.tensors, SLOTS, ends, state, SLOTS)
        assert bool(out.isfinite().all())
        results.append((out, state[[4, 1, 2, 0]]))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@KIND
def test_rejected_records_reach_nobody(kind):
    """Two windows that differ in what is rejected; their dead records are NaN afterwards besides."""
    lay, results = layer(kind, ring_len=16), []
    for seed in (1, 2):
        run = Run(lay, int32(2, 0), 14)
        run.verify(4, [4, 4], [4, 2])
        window = inputs(lay, 2, 4, seed)
        for x, source in zip(window, run.stream[:], strict=True):
            x[0, :2], x[1, :3] = source[4:6, 0], source[2:5, 1]
        pos, kept = ops.gather_cursors(run.pool.cursor, run.slots), int32(2, 3)
        verify(lay, run.pool, window, run.slots, pos, int32(4, 4))
        ops.commit_cursors(run.pool.cursor, run.slots, 16, int32(4, 4), kept)
        for slot, n in ((2, 6), (0, 5)):
            assert int(run.pool.cursor[slot]) == n
            for cache in run.pool.tensors[1:]:
                cache[slot, :, n:] = NAN
        run.done = [6, 5]
        outs = [run.pool.step(tuple(x[[run.done[0], run.done[1]], [0, 1]] for x in run.stream[:]), run.slots)]
        results.append((*outs, run.pool.flushed(run.slots)))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@KIND
@pytest.mark.parametrize(
    "slots", [int32(-1, 5, 2), int32(5, 2, -1), int32(5, -7, 0), int32(-1, 3, 4), int32(-1, -1, -1)]
)
def test_padding_rows(kind, slots):
    """Zero output, NaN input, garbage for cursor and length, and slot 0 is not their stand-in."""
    lay, live = layer(kind, ring_len=6), slots >= 0
    window = inputs(lay, 3, 4)
    for x in window:
        x[~live] = NAN
    cursors, lengths = torch.where(live, 3, 77).int(), torch.where(live, 4, -9).int()
    pool = filled_pool(lay, torch.arange(6), int32(*[3] * 6), 6)
    pool.initial_state.copy_(torch.randn(pool.initial_state.shape, generator=torch.Generator().manual_seed(1)))
    step(lay, slots, cursors, lengths, 4, pool=pool, window=window)


@KIND
@pytest.mark.parametrize("slots", [int32(1, 2, 4), int32(1, 2, 3)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_strided_pools_and_inputs(kind, state_dtype, slots):
    """Pools that are slices of larger storage are updated in that storage; gates may have any stride."""
    lay = layer(kind, ring_len=6, state_dtype=state_dtype)
    plain = filled_pool(lay, slots, int32(4, 1, 5), 5, 0.0)
    strided, storage = plain.on("cpu"), {}
    for name in ("initial_state", "d_cache", "k_cache", "g_cache"):
        tensor = getattr(plain, name)
        storage[name] = torch.full((5, 2, *tensor.shape[1:]), NAN, dtype=tensor.dtype)
        storage[name][:, 1] = tensor
        setattr(strided, name, storage[name][:, 1])
    mixed, a, b = inputs(lay, 3, 4)
    lengths, cursors = int32(4, 2, 3), int32(4, 1, 5)
    wide = torch.full((3, 5, mixed.shape[2] + 7), NAN)
    wide[:, 1:, 3:-4] = mixed
    gates = (a.transpose(0, -1).contiguous().transpose(0, -1), b.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    out = torch.full((3, 9, 6, 20), NAN)[:, 1::2]
    got = verify(lay, strided, (wide[:, 1:, 3:-4], *gates), slots, cursors, lengths, out=out)
    want = verify(lay, plain, (mixed, a, b), slots, cursors, lengths)
    tolerance.assert_close(got, want, limits(lay, 4)[0], "strided output")
    for name, whole in storage.items():
        assert bool(whole[:, 0].isnan().all()), f"{name}: wrote between the slots"
        limit = tolerance.state(12, 6, state_dtype)
        tolerance.assert_close(whole[slots.long(), 1], getattr(plain, name)[slots.long()], limit, name)


@KIND
def test_more_rows_times_heads_than_a_16_bit_grid_axis(kind):
    lay, rows = layer(kind, (32, 32, 4, 3), ring_len=3), 2049
    slots, window = torch.arange(rows, dtype=torch.int32), inputs(lay, rows, 2)
    lengths = (slots % 3).int()
    whole, halves = Pool(lay, rows, 0.0), Pool(lay, rows, 0.0)
    for pool in (whole, halves):
        pool.place(slots, lay.state(rows))
    out = verify(lay, whole, window, slots, torch.zeros_like(slots), lengths)
    parts = [
        verify(lay, halves, tuple(x[s] for x in window), slots[s], torch.zeros_like(slots[s]), lengths[s])
        for s in (slice(1024), slice(1024, None))
    ]
    tolerance.assert_close(torch.cat(parts), out, limits(lay, 2)[0], "halves")


@KIND
@pytest.mark.parametrize("log_decay", [-30.0, math.log(1e-12), -0.5, -1e-6])
def test_uniform_decay(kind, log_decay):
    lay, rng = layer(kind, ring_len=16), random.Random(3)
    lay.A_log = torch.full((6,), math.log(-log_decay))
    lay.dt_bias.zero_()
    run = Run(lay, int32(2, 0, 1), 64)
    run.stream.a.fill_(math.log(math.expm1(1.0)))  # softplus gives 1
    while any(map(run.left, range(3))):
        run.verify(5, [5] * 3, [rng.randint(0, 5) for _ in range(3)])
    run.check(5)


@KIND
@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("gate", [INF, 1e4, -INF])
def test_a_token_that_forgets_everything_or_nothing(kind, at, gate):
    """In the ring and in the window, for all channels and for some."""
    lay = layer(kind, ring_len=8)
    run = Run(lay, int32(2, 0, 1), 16)
    run.stream.a[at] = gate
    run.stream.a[at + 3, 1] = gate
    run.stream.a[at + 5, :, 0] = gate
    for lengths, accepted in (([3] * 3, [3, 2, 3]), ([4] * 3, [4, 4, 1]), ([4] * 3, [4] * 3), ([4] * 3, [4] * 3)):
        run.verify(4, lengths, accepted)
    run.check(4)


def test_bounded_gate_that_saturates():
    run = Run(layer("kda-bounded", ring_len=32), int32(2, 0, 1), 70)
    run.stream.a[::2] = 1e4
    run.stream.a[1::4] = -1e4
    while any(map(run.left, range(3))):
        run.verify(7, [7, 1, 7], [6, 1, 3])
    run.check(7)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_drift_over_4096_tokens_is_that_of_plain_replay(kind):
    """Windows of four drafts and one token, kept at random: the state stays as close to fp64 as decoded one by one."""
    lay, steps, rng = layer(kind, (1, 2, 16, 8), ring_len=16), 4096, random.Random(11)
    lay.A_log.fill_(-4.0)  # decay near 1: the state remembers hundreds of steps
    errors = []
    for windows in (True, False):
        run = Run(lay, int32(1, 0), steps)
        while any(map(run.left, range(2))):
            if windows:
                run.verify(5, [5, rng.choice((1, 5))], [rng.randint(0, 5), rng.randint(0, 1)])
            else:
                run.decode()
        want, states = run.truth()
        assert run.done == [steps] * 2
        tolerance.assert_close(run.outs, want, limits(lay, 5)[0] + 2e-5, "outputs")
        errors.append(tolerance.relative_error(run.states(), states))
    assert errors[0] <= 2 * errors[1] + tolerance.eps(torch.float32), errors
    assert errors[0] <= 2e-5, errors


@pytest.fixture
def debug():
    before = ops.debug_checks(True)
    yield
    ops.debug_checks(before)


def test_duplicates_in_debug(debug):
    lay, window = layer(), inputs(layer(), 2, 3)
    pool, twice, some = Pool(lay, 4, 0.5), int32(3, 3), int32(1, 1)
    stacked = torch.zeros(2, 3, 6, 20, 12)
    for call in (
        lambda: verify(lay, pool, window, twice, some, some),
        lambda: ops.commit_cursors(pool.cursor, twice, 8, some, some),
        lambda: ops.commit_snapshot(pool.initial_state, stacked, twice, some),
        lambda: ops.commit_kv_replay(*window, lay.A_log, lay.dt_bias, pool.initial_state, twice, some),
        lambda: ops.commit_fold(*pool.tensors, twice, some),
        lambda: ops.commit_conv(torch.zeros(4, 5, 3), torch.zeros(2, 3, 5), twice, some),
    ):
        before = [bits(x).clone() for x in (*pool.tensors, pool.cursor)]
        with pytest.raises(SlotError, match=r"\[3\] more than once"):
            call()
        assert all(torch.equal(bits(x), y) for x, y in zip((*pool.tensors, pool.cursor), before, strict=True))
    assert empty_out(lay, 2, 3).isnan().all()
