"""On a GPU: poison, canaries, padding, strides, empty batches, large pools and grids, a second device."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from tests import tolerance
from tests.decode_case import NAN, Pool, Tokens, int32, layer
from tests.ops.gpu_case import BF16, DEVICE, FP32, GPU, index
from tests.step_case import decode, filled_pool, rows_of, same

pytestmark = GPU
KIND = pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])
DIMS = pytest.mark.parametrize("dims", [(2, 4, 64, 32), (1, 2, 96, 192), (1, 3, 80, 24)])


@pytest.fixture(autouse=True)
def release_memory():
    """Several of these tests may run at once, in processes that would each keep what they had."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@KIND
@DIMS
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_poison_changes_no_bit(kind, dims, state_dtype):
    """Free slots, dead records, old outputs, row vectors of padding and the memory around inputs: NaN, then zeros."""
    lay = layer(kind, dims, 4, state_dtype=state_dtype, device=DEVICE)
    slots, cursors, force, results = int32(3, -1, 1, 0), int32(2, 77, 1, 3), int32(0, 1, 1, 0), []
    for fill in (NAN, 0.0):
        pool, token = filled_pool(lay, slots, cursors.clamp_max(3), 6, fill), []
        for x in lay.tokens(1, 4)[0]:
            wide = torch.full((6, *x.shape[1:-1], x.shape[-1] + 5), fill, device=DEVICE)
            wide[1:-1, ..., 2:-3] = x
            wide[2] = fill  # the padding row's own input
            token.append(wide[1:-1, ..., 2:-3])
        frame = torch.full((6, 1, *lay.empty_out(1).shape[2:]), fill, device=DEVICE)
        rows = [x.to(DEVICE) for x in (slots, cursors, force)]
        ops.fused_recurrent_linear_replayssm_decode(
            *token, lay.A_log, lay.dt_bias, None, *pool.tensors, frame[1:5], *rows, **lay.gate_args
        )
        copy = torch.full_like(pool.initial_state, fill)
        pos = index(3, 77, 0, 0)  # rows 2 and 3 have just folded
        ops.materialize(*pool.tensors, rows[0], pos, copy, rows[0])
        ops.flush(*pool.tensors, rows[0], pos)
        states, again = pool.initial_state[[3, 1, 0]].clone(), torch.full_like(frame, fill)
        ops.fused_recurrent_linear_packed_decode(
            *token, lay.A_log, lay.dt_bias, None, pool.initial_state, again[1:5], rows[0], **lay.gate_args
        )
        free = [2, 4, 5]
        for edge in (frame[[0, 5]], again[[0, 5]], pool.initial_state[free], copy[free], pool.d_cache[:, :, 3]):
            assert same(edge, torch.full_like(edge, fill)), "something was written that no row owns"
        results.append((frame[1:5], again[1:5], states, copy[[3, 1, 0]], pool.initial_state[[3, 1, 0]]))
    for a, b in zip(*results, strict=True):
        assert bool(a.isfinite().all())
        assert same(a, b)


@KIND
@DIMS
@pytest.mark.parametrize("slots", [int32(-1, 5, 2), int32(5, 2, -1), int32(5, -1, 0, -7), int32(-1, -1)])
def test_padding_rows(kind, dims, slots):
    """Zeros out, NaN in, cursors beyond the ring; every other slot keeps its bits, slot 0 too."""
    lay, live, rows = layer(kind, dims, 4, device=DEVICE), slots >= 0, len(slots)
    pool = filled_pool(lay, torch.arange(6), int32(*[2] * 6), 6)
    pool.initial_state[[1, 3]] = 7.0
    alone, before = pool.on(DEVICE), pool.on(DEVICE)
    tokens = lay.tokens(1, rows)
    for x in tokens[:]:
        x[:, ~live.to(DEVICE)] = NAN
    cursors, force = torch.where(live, 2, 99).int(), torch.arange(rows).int() % 2
    out = decode(lay, pool, tokens[0], slots, cursors, force)
    packed = pool.packed_step(tokens[0], slots.to(DEVICE))
    for got in (out, packed):
        assert torch.equal(got[~live.to(DEVICE)], torch.zeros_like(got[~live.to(DEVICE)]))
    pos = torch.where(live, 3 * (1 - force), 99).int().to(DEVICE)
    ops.flush(*pool.tensors, slots.to(DEVICE), pos)
    if bool(live.any()):
        mine = rows_of(tokens, live.to(DEVICE))[0]
        want = decode(lay, alone, mine, slots[live], cursors[live], force[live])
        limit = tolerance.output(dims[2], 4)
        tolerance.assert_close(out[live.to(DEVICE)], want, 2 * limit, "live rows")
        want = alone.packed_step(mine, slots[live].to(DEVICE))
        tolerance.assert_close(packed[live.to(DEVICE)], want, 2 * limit, "live rows, packed")
        ops.flush(*alone.tensors, slots[live].to(DEVICE), pos[live.to(DEVICE)])
    others = [s for s in range(6) if s not in slots.tolist()]
    for new, old in zip(pool.tensors, before.tensors, strict=True):
        assert same(new[others], old[others]), "a slot outside the batch was written"
    tolerance.assert_close(pool.initial_state, alone.initial_state, 2 * tolerance.state(dims[2], 4), "states")


@KIND
@DIMS
def test_no_rows(kind, dims):
    lay = layer(kind, dims, 4, device=DEVICE)
    pool, token, none = Pool(lay, 3), lay.tokens(1, 0)[0], index()
    assert pool.step(token, none).shape == (0, dims[1], dims[3])
    assert pool.packed_step(token, none).shape == (0, dims[1], dims[3])
    ops.flush(*pool.tensors, none, none)
    ops.materialize(*pool.tensors, none, none, pool.initial_state, none)
    assert ops.gather_cursors(pool.cursor, none).shape == ops.force_flush_mask(none, 4, none).shape == (0,)
    conv = torch.zeros(2, 7, 3, device=DEVICE), torch.zeros(7, 4, device=DEVICE)
    assert ops.causal_conv_update(torch.zeros(0, 7, device=DEVICE), *conv, None, none).shape == (0, 7)


@KIND
@DIMS
def test_strides(kind, dims):
    """Pools, inputs, parameters, outputs and row vectors that are slices of something larger."""
    lay = layer(kind, dims, 4, state_dtype=BF16, device=DEVICE)
    slots, cursors, force = int32(1, 4, 2), int32(0, 3, 1), int32(0, 0, 1)
    plain, token = filled_pool(lay, slots, cursors, 5), lay.tokens(1, 3)[0]
    strided, storage = plain.on(DEVICE), {}
    for name in ("initial_state", "d_cache", "k_cache", "g_cache"):
        tensor = getattr(strided, name)
        storage[name] = torch.full((5, 2, *tensor.shape[1:]), NAN, dtype=tensor.dtype, device=DEVICE)
        storage[name][:, 1] = tensor
        setattr(strided, name, storage[name][:, 1])
    want = decode(lay, plain, token, slots, cursors, force)
    want_packed = plain.packed_step(token, slots.to(DEVICE))
    mixed, a, b = token
    wide = torch.full((3, mixed.shape[1] + 8), NAN, device=DEVICE)
    wide[:, 3:-5] = mixed
    token = (wide[:, 3:-5], a.transpose(0, -1).contiguous().transpose(0, -1), b.t().contiguous().t())
    weights = spread(lay.A_log), spread(lay.dt_bias)
    rows = [spread(x.to(DEVICE)) for x in (slots, cursors, force)]
    outs = torch.full((2, 3, 2, dims[1], dims[3]), NAN, device=DEVICE)
    ops.fused_recurrent_linear_replayssm_decode(
        *token, *weights, None, *strided.tensors, outs[0, :, 1:], *rows, **lay.gate_args
    )
    ops.fused_recurrent_linear_packed_decode(
        *token, *weights, None, strided.initial_state, outs[1, :, 1:], rows[0], **lay.gate_args
    )
    ops.flush(*strided.tensors, rows[0], spread(index(1, 0, 0)))
    ops.flush(*plain.tensors, slots.to(DEVICE), index(1, 0, 0))
    # Other strides may be other code, so sums may be in another order.
    state_limit = tolerance.state(dims[2], 4, BF16, 2)
    tolerance.assert_close(outs[0, :, 1], want, 2 * tolerance.output(dims[2], 4), "output")
    tolerance.assert_close(outs[1, :, 1], want_packed, 2 * (tolerance.output(dims[2], 4) + state_limit), "packed")
    tolerance.assert_close(strided.initial_state[[1, 4, 2]], plain.initial_state[[1, 4, 2]], 2 * state_limit, "state")
    assert bool(outs[:, :, 0].isnan().all())
    assert all(bool(whole[:, 0].isnan().all()) for whole in storage.values()), "wrote between the slots"


def spread(x):
    """The same values, every other element of a larger tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 77, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


GAP, MANY = 1 << 15, 70_000  # elements between slots, and slots: 2.3e9 elements in a pool


def spaced(tensors, count):
    """Pools of `count` slots, GAP elements apart, whose last slots hold those of `tensors`; the rest is not touched.

    Tensors of one dtype lie in one allocation.
    """
    memory, used, views = {}, {}, []
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype not in memory:
            memory[dtype], used[dtype] = torch.empty(count * GAP, dtype=dtype, device=DEVICE), 0
        shape, strides = (count, *tensor.shape[1:]), (GAP, *tensor.stride()[1:])
        views.append(memory[dtype].as_strided(shape, strides, used[dtype]))
        views[-1][-len(tensor) :] = tensor
        used[dtype] += -(-tensor[0].numel() // 16) * 16
    assert max(used.values()) <= GAP
    return views


@KIND
@pytest.mark.parametrize("dims", [(1, 2, 64, 32), (1, 2, 48, 40)])
def test_pools_beyond_32_bit_offsets(kind, dims):
    """The last slots of 70,000 behave as those of a pool of two, to the bit."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of GPU memory")
    lay, cursors = layer(kind, dims, 4, io=BF16, device=DEVICE), int32(1, 3)
    filled, token, results = filled_pool(lay, int32(1, 0), cursors, 2), lay.tokens(1, 2)[0], []
    for count in (2, MANY):
        pool = filled.on(DEVICE)
        pool.initial_state, pool.d_cache, pool.g_cache, pool.k_cache = spaced(
            (pool.initial_state, pool.d_cache, pool.g_cache, pool.k_cache), count
        )
        slots = int32(count - 1, count - 2)
        rows, cursor = slots.to(DEVICE), torch.zeros(count, dtype=torch.int32, device=DEVICE)
        ops.advance_cursors(cursor, rows, 8, None, index(1, 3))
        pos = ops.gather_cursors(cursor, rows)
        assert pos.tolist() == [1, 3]
        copy = torch.zeros_like(filled.initial_state)
        outs = decode(lay, pool, token, slots, cursors, None), pool.packed_step(token, rows)
        ops.materialize(*pool.tensors, rows, pos, copy, index(0, 1))
        ops.flush(*pool.tensors, rows, index(2, 0))
        results.append([*outs, copy, *(t[-2:].clone() for t in pool.tensors)])
        ops.materialize(*filled.tensors, index(1, 0), index(1, 3), pool.initial_state, rows)
        results[-1].append(pool.initial_state[-2:].clone())
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)
    assert bool(results[1][0].isfinite().all())


def test_conv_windows_beyond_32_bit_offsets():
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB of GPU memory")
    windows, results = torch.randn(2, 300, 3).to(DEVICE, BF16), []
    x, weight = torch.randn(1, 300).to(DEVICE, BF16), torch.randn(300, 4).to(DEVICE, BF16)
    for count in (2, MANY):
        (state,) = spaced((windows,), count)
        y = ops.causal_conv_update(x, state, weight, None, index(count - 1))
        results.append((y, state[-2:].clone()))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)
    assert torch.equal(results[1][1][1, :, 2], x[0])


@KIND
@pytest.mark.parametrize("dims", [(32, 32, 32, 32), (32, 32, 4, 3)])
def test_more_rows_times_heads_than_a_16_bit_grid_axis(kind, dims):
    """2049 x 32 programs at least; the last rows are those that a short grid would lose."""
    lay, rows = layer(kind, dims, 2, device=DEVICE), 2049
    tokens, slots = lay.tokens(3, rows), torch.arange(rows, dtype=torch.int32, device=DEVICE)
    pool, state = Pool(lay, rows), lay.state(rows)
    pool.place(slots, state)
    out = pool.run(tokens, slots)
    copy = torch.full_like(state, NAN)
    ops.materialize(*pool.tensors, slots, ops.gather_cursors(pool.cursor, slots), copy, slots)
    final = pool.flushed(slots)
    last = slice(rows - 3, rows)
    want, want_state = lay.serial(state[last], Tokens(*(x[:, last] for x in tokens[:])))
    tolerance.assert_close(out[:, last].cpu(), want, tolerance.output(dims[2], 2), "output")
    for got in (copy, final):
        assert bool(got.isfinite().all())
        tolerance.assert_close(got[last].cpu(), want_state, tolerance.state(dims[2], 2), "state")
    packed = pool.packed_step(tokens[0], slots)
    want, _ = lay.serial(final[last], Tokens(*(x[:1, last] for x in tokens[:])))
    tolerance.assert_close(packed[last].cpu(), want[0], tolerance.output(dims[2], 1), "packed")


def test_many_rows_of_the_small_operations():
    rows = 70_001
    slots, cursor = torch.randperm(rows).int().to(DEVICE), torch.full((rows,), 3, dtype=torch.int32, device=DEVICE)
    cursor[slots[-1].long()] = 7
    assert ops.gather_cursors(cursor, slots)[-2:].tolist() == [3, 7]
    ops.advance_cursors(cursor, slots, 8)
    assert cursor[slots.long()].tolist() == [4] * (rows - 1) + [0]
    assert ops.force_flush_mask(torch.arange(rows, device=DEVICE), 70_000, slots).nonzero().tolist() == [[70_000]]
    x, weight = torch.randn(rows, 3).to(DEVICE), torch.randn(3, 2).to(DEVICE)
    state = torch.randn(rows, 3, 1).to(DEVICE)
    want = x * weight[:, 1] + state[slots.long(), :, 0] * weight[:, 0]
    y = ops.causal_conv_update(x, state, weight, None, slots, None)
    tolerance.assert_close(y, want, 2 * tolerance.output(2, 0), "conv")
    assert torch.equal(state[slots.long(), :, 0], x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dims", [(2, 4, 64, 32), (1, 2, 96, 40)])
def test_tensors_on_a_device_that_is_not_the_current_one(dims):
    results = []
    for device in ("cuda:0", "cuda:1"):
        lay = layer("kda", dims, 4, device=device)
        pool, tokens, slots = Pool(lay, 4, 0.0), lay.tokens(7, 2), int32(3, 1).to(device)
        pool.place(slots, lay.state(2))
        out = pool.run(tokens, slots, torch.stack([ops.force_flush_mask(slots + t, 5, slots) for t in range(7)]))
        x = torch.randn(2, 9, generator=torch.Generator().manual_seed(1)).to(device)
        y = ops.causal_conv_update(x, x[:, :, None].repeat(2, 1, 3), x[0, :, None].repeat(1, 4), None, slots)
        copy = torch.zeros_like(pool.initial_state)
        ops.materialize(*pool.tensors, slots, ops.gather_cursors(pool.cursor, slots), copy, slots)
        results.append([t.cpu() for t in (out, y, copy, pool.flushed(slots), pool.packed_step(tokens[0], slots))])
        assert torch.cuda.current_device() == 0
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
