"""Flush, materialize, cursors and the conv update in the Triton interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.kernels.triton.interpreter  # noqa: F401 # isort: skip - before anything that imports Triton

from replayssm import ops, reference
from replayssm.kernels import torch_backend
from replayssm.kernels.triton import backend
from tests import tolerance
from tests.decode_case import KINDS, NAN, Pool, int32, layer
from tests.step_case import bits, filled_pool, same

KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])
CURSORS = int32(0, 4, 3, 1, 2)


def layered(kind, layers=2, dims=(1, 2, 12, 20), **options):
    """Pools [layers, 5 slots, …] at CURSORS, as slices of larger storage."""
    lay = layer(kind, dims, 4, **options)
    pools = [filled_pool(lay, torch.arange(5), CURSORS, 5, seed=i).tensors for i in range(layers)]
    stacked = []
    for parts in zip(*pools, strict=True):
        wide = torch.full((layers, 5, 2, *parts[0].shape[1:]), NAN, dtype=parts[0].dtype)
        wide[:, :, 1] = torch.stack(parts)
        stacked.append(wide[:, :, 1])
    return lay, stacked


def truth(lay, pools, src, cursors, dst_state, dst):
    return [
        reference.materialize(*(p[i] for p in pools), src, cursors, dst_state[i], dst, lay.l2norm)
        for i in range(len(dst_state))
    ]


@KIND
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flush_of_all_layers_at_once(kind, state_dtype):
    """Rings from empty to full; padding; the slots left out, the rings and an empty slot keep every bit."""
    lay, pools = layered(kind, state_dtype=state_dtype)
    before, slots = [p.clone() for p in pools], int32(4, -1, 1, 2, 0)
    pos = CURSORS[slots.clamp_min(0).long()]
    want = truth(lay, before, slots, pos, before[0], slots)
    ops.flush(*pools, slots, pos)
    for i in range(2):
        for slot in (4, 1, 2):
            limit = tolerance.state(12, 4, state_dtype)
            tolerance.assert_close(pools[0][i, slot], want[i][slot], limit, f"layer {i}, slot {slot}")
    assert same(pools[0][:, [0, 3]], before[0][:, [0, 3]])
    assert all(same(new, old) for new, old in zip(pools[1:], before[1:], strict=True))


@KIND
def test_flush_of_one_layer_is_the_same(kind):
    _, pools = layered(kind)
    single, slots = [p.clone() for p in pools], int32(2, 3)
    ops.flush(*pools, slots, CURSORS[slots.long()])
    for i in range(2):
        ops.flush(*(p[i] for p in single), slots, CURSORS[slots.long()])
    assert all(same(a, b) for a, b in zip(pools, single, strict=True))


@KIND
@pytest.mark.parametrize("dst_dtype", [torch.float32, torch.float16])
def test_materialize_leaves_the_source(kind, dst_dtype):
    """A source may be named twice; an empty ring is an exact copy; skipped pairs touch nothing."""
    lay, pools = layered(kind)
    before, src, dst = [p.clone() for p in pools], int32(1, 0, -1, 3, 1, 2), int32(6, 0, 5, -1, 3, 2)
    target = torch.full((2, 7, *pools[0].shape[2:]), NAN, dtype=dst_dtype)
    pos = CURSORS[src.clamp_min(0).long()]
    want = truth(lay, before, src, pos, target, dst)
    ops.materialize(*pools, src, pos, target, dst)
    for i in range(2):
        for slot in (6, 0, 3, 2):
            tolerance.assert_close(target[i, slot], want[i][slot], tolerance.state(12, 4, dst_dtype), f"slot {slot}")
    assert same(target[:, 0], pools[0][:, 0].to(dst_dtype))
    assert bool(target[:, [1, 4, 5]].isnan().all())
    assert all(same(new, old) for new, old in zip(pools, before, strict=True))


@KIND
def test_an_empty_ring_is_copied_to_the_bit(kind):
    """The sign of a zero too, and a subnormal number."""
    _, pools = layered(kind)
    pools[0][:, 0, 0, 0, :3] = torch.tensor([-0.0, 0.0, 1e-40])
    target = torch.full((2, 1, *pools[0].shape[2:]), NAN)
    ops.materialize(*pools, int32(0), int32(0), target, int32(0))
    assert same(target[:, 0], pools[0][:, 0])


@KIND
def test_a_slot_may_be_materialized_onto_itself(kind):
    """Pairs whose two slots are one equal a flush."""
    _, pools = layered(kind)
    flushed, slots = pools[0].clone(), int32(2, 4, -1, 0)
    pos = CURSORS[slots.clamp_min(0).long()]
    ops.flush(flushed, *pools[1:], slots, pos)
    ops.materialize(*pools, slots, pos, pools[0], slots)
    assert same(pools[0], flushed)


@KIND
def test_materialize_within_one_pool_then_flush_agree_to_the_bit(kind):
    _, pools = layered(kind)
    ops.materialize(*pools, int32(2, 4), CURSORS[[2, 4]], pools[0], int32(1, 3))
    ops.flush(*pools, int32(2, 4), CURSORS[[2, 4]])
    assert same(pools[0][:, [1, 3]], pools[0][:, [2, 4]])


@KIND
@pytest.mark.parametrize("dims", [(3, 3, 33, 7), (2, 4, 96, 3), (1, 1, 128, 64), (1, 1, 5, 250)])
def test_flush_of_other_dims_and_without_l2norm(kind, dims):
    lay, pools = layered(kind, 1, dims, l2norm=dims[0] > 1)
    before, slots = [p.clone() for p in pools], int32(1)
    want = truth(lay, before, slots, int32(4), before[0], slots)
    ops.flush(*pools, slots, int32(4), lay.l2norm)
    tolerance.assert_close(pools[0][0, 1], want[0][1], tolerance.state(dims[2], 4), "state")


@KIND
def test_flush_after_a_step_that_forgets_everything(kind):
    lay, pools = layered(kind, 1)
    pools[3][0, 1, 1, 2] = -torch.inf
    before, slots = [p.clone() for p in pools], int32(1)
    want = truth(lay, before, slots, int32(4), before[0], slots)
    ops.flush(*pools, slots, int32(4))
    tolerance.assert_close(pools[0][0, 1], want[0][1], tolerance.state(12, 4), "state")


def test_flush_saturates_fp16_and_empty_index_lists_do_nothing():
    _, pools = layered("gdn", 1, state_dtype=torch.float16)
    pools[1][:, 1] = 1e6
    ops.flush(*pools, int32(1), int32(4))
    assert float(pools[0][0, 1].abs().max()) == 65504.0
    before = [p.clone() for p in pools]
    ops.flush(*pools, int32(), int32())
    ops.materialize(*pools, int32(), int32(), pools[0], int32())
    assert all(same(new, old) for new, old in zip(pools, before, strict=True))


def test_flush_past_32_bit_offsets(tmp_path):
    lay = layer("kda", (1, 1, 8, 4), 2)
    small = filled_pool(lay, int32(0, 1), int32(2, 1), 2)
    views = []
    for i, tensor in enumerate(small.tensors):
        whole = torch.from_file(str(tmp_path / str(i)), shared=True, size=70_000 << 15, dtype=tensor.dtype)
        views.append(whole.as_strided((70_000, *tensor.shape[1:]), (1 << 15, *tensor.stride()[1:])))
        views[-1][69_998:] = tensor
    ops.flush(*views, int32(69_998, 69_999), int32(2, 1))
    ops.flush(*small.tensors, int32(0, 1), int32(2, 1))
    assert same(views[0][69_998:], small.initial_state)
    assert not views[0][0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_kernels_share_the_ring(kind):
    """Steps alternate between the two, with one that forgets everything; then each folds what both have written."""
    lay, backends = layer(kind, (1, 2, 12, 20), 8), (backend, torch_backend)
    pool, state, tokens, slots = Pool(lay, 3), lay.state(2), lay.tokens(14, 2), int32(2, 0)
    pool.place(slots, state)
    tokens.a[[3, 10], :, 1] = torch.inf
    outs = []
    for t in range(14):
        out, pos = lay.empty_out(2), int32(t % 8, t % 8)
        gate = (*tokens[t], lay.A_log, lay.dt_bias, 12**-0.5)
        backends[t % 2].replay_decode(*gate, *pool.tensors, out, slots, pos, None, *lay.gate_args.values())
        outs.append(out[:, 0])
    want, final = lay.serial(state, tokens)
    tolerance.assert_close(torch.stack(outs), want, tolerance.output(12, 8), "output")
    for one in backends:
        folded = pool.on("cpu")
        one.flush(*folded.tensors, slots, int32(6, 6), True)
        tolerance.assert_close(folded.initial_state[[2, 0]], final, tolerance.state(12, 8), one.__name__)


@pytest.mark.parametrize("with_force", [False, True])
@pytest.mark.parametrize("with_counts", [False, True])
def test_advance_and_gather(with_force, with_counts):
    """More rows than one program, padding in between; every row against the scalar rule."""
    gen = torch.Generator().manual_seed(3)
    cursor = torch.randint(0, 8, (700,), generator=gen).int()
    slots = torch.randperm(700, generator=gen)[:600].int()
    slots[::7] = -1
    force = torch.randint(0, 3, (600,), generator=gen).int() if with_force else None
    counts = torch.randint(0, 10, (600,), generator=gen).int() if with_counts else None
    want = cursor.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            n = int(counts[i]) if with_counts else 1
            want[slot] = reference.advance_cursor(int(cursor[slot]), 8, bool(with_force and force[i]), n)
    gathered = ops.gather_cursors(cursor, slots)
    assert torch.equal(gathered, torch.where(slots < 0, 0, cursor[slots.long()]))
    assert gathered.dtype == torch.int32
    ops.advance_cursors(cursor, slots, 8, force, counts)
    assert torch.equal(cursor, want)


def test_cursors_with_strides_and_no_rows():
    wide = torch.full((10, 2), 5, dtype=torch.int32)
    cursor, slots = wide[:, 0], torch.stack([int32(3, -1, 9), int32(0, 0, 0)], 1)[:, 0]
    assert ops.gather_cursors(cursor, slots).tolist() == [5, 0, 5]
    ops.advance_cursors(cursor, slots, 6)
    assert cursor.tolist() == [5, 5, 5, 0, 5, 5, 5, 5, 5, 0]
    assert bool((wide[:, 1] == 5).all())
    backend.advance_cursors(cursor, int32(), 6, None, None)
    assert backend.gather_cursors(cursor, int32()).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("interval", [64, 1, 0, -3, 1 << 33])
@pytest.mark.parametrize("padded", [False, True])
def test_force_flush_mask(dtype, interval, padded):
    """More rows than one program; every row against the scalar rule; strides everywhere."""
    lens = torch.arange(-2, 1198, dtype=dtype)[::2]
    if dtype == torch.int64:
        lens[3] = interval * 5
    slots = torch.arange(1200, dtype=torch.int32)[::2] if padded else None
    if padded:
        slots[::3] = -1
    out = torch.full((600, 2), 7, dtype=torch.int32)
    mask = ops.force_flush_mask(lens, interval, slots, out[:, 1])
    want = [reference.force_flush(int(n), interval, int(slots[i]) if padded else 0) for i, n in enumerate(lens)]
    assert mask.tolist() == [int(flag) for flag in want]
    assert bool((out[:, 0] == 7).all())
    fresh = ops.force_flush_mask(lens, interval, slots)
    assert torch.equal(fresh, mask)
    assert fresh.dtype == torch.int32
    assert ops.force_flush_mask(lens[:0], interval).shape == (0,)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("channels_last", [False, True])
def test_conv_against_reference_for_many_steps(width, extra, activation, channels_last):
    gen, slots = torch.Generator().manual_seed(0), int32(3, -1, 0)
    state = torch.randn(5, 33, width - 1 + extra, generator=gen)
    if channels_last:
        state = state.mT.contiguous().mT
    weight, bias = torch.randn(33, width, generator=gen), torch.randn(33, generator=gen) if extra else None
    want_state = state.double()
    for _ in range(4):
        x = torch.randn(3, 33, generator=gen)
        x[1] = NAN
        out = torch.full((3, 33), NAN)
        y = ops.causal_conv_update(x, state, weight, bias, slots, activation, out)
        want, want_state = reference.causal_conv_update(x, want_state, weight, bias, slots, activation)
        tolerance.assert_close(y, want, tolerance.output(width, 0), "y")
        assert torch.equal(state.double(), want_state)


def test_conv_may_write_over_its_input():
    state, weight, slots = torch.randn(4, 33, 3), torch.randn(33, 4), int32(3, -1, 0)
    again, x = state.clone(), torch.randn(3, 33)
    want = ops.causal_conv_update(x.clone(), again, weight, None, slots)
    assert torch.equal(ops.causal_conv_update(x, state, weight, None, slots, out=x), want)
    assert torch.equal(state, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_conv_in_16_bit_over_several_programs(dtype, state_dtype):
    """Poison in old columns and other slots; channels that are no multiple of a tile; strides everywhere."""
    gen, slots, channels = torch.Generator().manual_seed(1), int32(1, 3), 300
    storage = torch.full((5, 2, channels, 6), NAN, dtype=state_dtype or dtype)
    state = storage[:, 1]
    state[[1, 3], :, 3:] = torch.randn(2, channels, 3, generator=gen).to(state.dtype)
    weight = torch.randn(4, channels, generator=gen).to(dtype).t()
    bias = torch.randn(2 * channels, generator=gen).to(dtype)[::2]
    x = torch.randn(2, 2 * channels, generator=gen).to(dtype)[:, ::2]
    want, want_state = reference.causal_conv_update(x, state, weight, bias, slots)
    out = torch.full((2, channels + 9), NAN, dtype=dtype)
    y = ops.causal_conv_update(x, state, weight, bias, slots, out=out[:, :channels])
    tolerance.assert_close(y, want, tolerance.output(4, 0, dtype), "y")
    assert same(state, want_state)
    assert bool(storage[:, 0].isnan().all())
    assert bool(out[:, channels:].isnan().all())


def test_conv_past_32_bit_offsets(tmp_path):
    whole = torch.from_file(str(tmp_path / "conv"), shared=True, size=70_000 << 15, dtype=torch.bfloat16)
    state = whole.as_strided((70_000, 8, 3), (1 << 15, 3, 1))
    x, weight = torch.randn(1, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    ops.causal_conv_update(x, state, weight, None, int32(69_999))
    assert torch.equal(bits(state[69_999, :, 2]), bits(x[0]))
    assert not state[0].any()
