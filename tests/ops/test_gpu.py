"""Every operation on a GPU against the same operation on the CPU and the fp64 reference."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops, reference
from tests import tolerance
from tests.decode_case import KINDS, NAN, int32, layer
from tests.ops.gpu_case import BF16, DEVICE, DIMS, FP16, FP32, GPU, assert_agree, check_run, index
from tests.step_case import filled_pool, same, step

pytestmark = GPU
ODD = DIMS[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dims", "ring_len"), list(zip(DIMS, (16, 16, 8, 5), strict=True)))
def test_replay(kind, dims, ring_len):
    check_run(layer(kind, dims, ring_len, device=DEVICE), 2 * ring_len + 3)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", DIMS[:2])
@pytest.mark.parametrize("ring_len", [1, 2, 32])
def test_ring_lengths(kind, dims, ring_len):
    check_run(layer(kind, dims, ring_len, device=DEVICE), 2 * ring_len + 3, forced=0.05)


@pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])
@pytest.mark.parametrize("dims", DIMS[:2])
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
def test_state_dtypes(kind, dims, state_dtype):
    lay = layer(kind, dims, 8, state_dtype=state_dtype, device=DEVICE)
    check_run(lay, 21)
    check_run(lay, 5, packed=True)


@pytest.mark.parametrize("kind", ["gdn", "kda-bounded"])
@pytest.mark.parametrize("dims", DIMS[:2])
@pytest.mark.parametrize("io", [BF16, FP16])
def test_activation_dtypes(kind, dims, io):
    lay = layer(kind, dims, 8, io=io, device=DEVICE)
    check_run(lay, 21)
    check_run(lay, 5, packed=True)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (1, 2, 256, 3), (5, 5, 16, 250), (2, 2, 256, 256)])
def test_smallest_and_largest_heads(kind, dims):
    check_run(layer(kind, dims, 4, device=DEVICE), 11)


@pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])
@pytest.mark.parametrize("dims", [(2, 4, 64, 32), (1, 3, 80, 48)])
def test_every_cursor_with_and_without_forced_flush(kind, dims):
    """A batch of all pairs (cursor, flag) on made-up rings; every bit that no row owns is compared."""
    pairs = [(n, f) for n in range(8) for f in (0, 5)]
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int() + 1
    step(layer(kind, dims, 8, device=DEVICE), slots, int32(*(n for n, _ in pairs)), int32(*(f for _, f in pairs)))


@pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])
@pytest.mark.parametrize("dims", [(1, 2, 64, 32), (1, 2, 96, 40)])
def test_gates_from_minus_to_plus_infinity(kind, dims):
    """A row for each gate input, at a cursor where it is stored and at one where it is folded; then one more step."""
    x = torch.tensor([-torch.inf, -1e4, -20.0, 0.0, 19.9, 20.1, 89.0, 1e4, torch.inf]).repeat(2).to(DEVICE)
    lay, rows = layer(kind, dims, 4, device=DEVICE), 18
    lay.A_log, slots = torch.tensor([-10.0, 3.0], device=DEVICE), torch.arange(rows, dtype=torch.int32)
    lay.dt_bias.zero_()
    token, again = lay.tokens(1, rows)[0], lay.tokens(1, rows, seed=5)[0]
    token[1].copy_(x.view(-1, *[1] * (token[1].ndim - 1)).expand_as(token[1]))
    cursors = int32(*[1] * 9, *[3] * 9)
    _, pool = step(lay, slots, cursors, token=token)
    step(lay, slots, (cursors + 1) % 4, pool=pool, token=again)


CURSORS = int32(0, 4, 3, 1, 2)


def layered(kind, dims, state_dtype=FP32):
    """Pools [2 layers, 5 slots, …] with rings from empty to full, as slices of larger storage."""
    lay = layer(kind, dims, 4, state_dtype=state_dtype)
    pools = [filled_pool(lay, torch.arange(5), CURSORS, 5, seed=i).tensors for i in range(2)]
    stacked = []
    for parts in zip(*pools, strict=True):
        wide = torch.full((2, 5, 2, *parts[0].shape[1:]), NAN, dtype=parts[0].dtype, device=DEVICE)
        wide[:, :, 1] = torch.stack(parts).to(DEVICE)
        stacked.append(wide[:, :, 1])
    return stacked, [p.cpu().contiguous() for p in stacked]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", [(1, 2, 64, 128), (1, 2, 96, 24)])
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
def test_flush_of_all_layers(kind, dims, state_dtype):
    pools, cpu = layered(kind, dims, state_dtype)
    before, slots = [p.clone() for p in cpu], int32(4, -1, 1, 2, 0)
    pos = CURSORS[slots.clamp_min(0).long()]
    ops.flush(*pools, slots.to(DEVICE), pos.to(DEVICE))
    ops.flush(*cpu, slots, pos)
    for i in range(2):
        want = reference.flush(*(p[i] for p in before), slots, pos)
        limit = tolerance.state(dims[2], 4, state_dtype)
        for slot in (4, 1, 2):
            assert_agree(pools[0][i, slot], cpu[0][i, slot], want[slot], limit, f"layer {i}, slot {slot}")
    assert same(pools[0][:, [0, 3]].cpu(), before[0][:, [0, 3]])
    assert all(same(new.cpu(), old) for new, old in zip(pools[1:], before[1:], strict=True))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", [(1, 2, 64, 128), (1, 2, 96, 24)])
@pytest.mark.parametrize("dst_dtype", [FP32, FP16])
def test_materialize_of_all_layers(kind, dims, dst_dtype):
    """One source twice, an empty ring, skipped pairs, a destination that is a slice of something larger."""
    pools, cpu = layered(kind, dims)
    pools[0][:, 0, 0, 0, 0] = cpu[0][:, 0, 0, 0, 0] = -0.0
    before, src, dst = [p.clone() for p in cpu], int32(1, 0, -1, 3, 1, 2), int32(6, 0, 5, -1, 3, 2)
    pos = CURSORS[src.clamp_min(0).long()]
    whole = torch.full((2, 7, 3, *pools[0].shape[2:]), NAN, dtype=dst_dtype, device=DEVICE)
    target, cpu_target = whole[:, :, 1], torch.full((2, 7, *pools[0].shape[2:]), NAN, dtype=dst_dtype)
    ops.materialize(*pools, src.to(DEVICE), pos.to(DEVICE), target, dst.to(DEVICE))
    ops.materialize(*cpu, src, pos, cpu_target, dst)
    for i in range(2):
        want = reference.materialize(*(p[i] for p in before), src, pos, cpu_target[i], dst)
        for slot in (6, 0, 3, 2):
            limit = tolerance.state(dims[2], 4, dst_dtype)
            assert_agree(target[i, slot], cpu_target[i, slot], want[slot], limit, f"layer {i}, slot {slot}")
    assert same(target[:, 0].cpu(), before[0][:, 0].to(dst_dtype)), "an empty ring is copied to the bit"
    assert bool(target[:, [1, 4, 5]].isnan().all())
    assert bool(whole[:, :, [0, 2]].isnan().all())
    assert all(same(new.cpu(), old) for new, old in zip(pools, before, strict=True))
    ops.materialize(*pools, index(4), index(2), pools[0], index(3))
    ops.flush(*pools, index(4), index(2))
    tolerance.assert_close(pools[0][:, 3], pools[0][:, 4], 2 * tolerance.state(dims[2], 4), "within one pool")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", [(1, 2, 64, 128), (1, 2, 96, 24)])
def test_fp16_saturates(kind, dims):
    pools, _ = layered(kind, dims, FP16)
    pools[1][:, 1] = 1e6
    target = torch.zeros_like(pools[0])
    ops.materialize(*pools, index(1), index(4), target, index(0))
    ops.flush(*pools, index(1), index(4))
    assert float(pools[0][:, 1].abs().max()) == float(target[:, 0].abs().max()) == 65504.0


@pytest.mark.parametrize(("width", "extra", "activation"), [(4, 0, "silu"), (4, 3, None), (2, 1, "silu"), (1, 0, None)])
@pytest.mark.parametrize(("io", "state_dtype"), [(FP32, FP32), (BF16, BF16), (FP16, FP32), (BF16, FP16)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_conv(width, extra, activation, io, state_dtype, channels_last):
    """Channels that are no multiple of a tile; strides, NaN in a padding row, between windows and behind the output."""
    gen, slots, channels = torch.Generator().manual_seed(0), int32(3, -1, 0), 600
    windows = torch.randn(5, channels, width - 1 + extra, generator=gen).to(state_dtype)
    storage = torch.full((5, 2, *windows.shape[1:]), NAN, dtype=state_dtype, device=DEVICE)
    if channels_last:
        storage = torch.full((5, 2, width - 1 + extra, channels), NAN, dtype=state_dtype, device=DEVICE).mT
    storage[:, 1] = windows.to(DEVICE)
    weight = torch.randn(width, channels, generator=gen).to(io).t()
    bias = torch.randn(2 * channels, generator=gen).to(io)[::2] if extra else None
    want_windows, cpu_windows = windows.clone(), windows.clone()
    for _ in range(4):
        x = torch.randn(3, 2 * channels, generator=gen).to(io)[:, ::2]
        x[1] = NAN
        wide = torch.full((3, channels + 9), NAN, dtype=io, device=DEVICE)
        on_device = torch.full((3, 2 * channels), NAN, dtype=io, device=DEVICE)[:, ::2]
        on_device.copy_(x)
        args = (weight.to(DEVICE), None if bias is None else bias.to(DEVICE), slots.to(DEVICE), activation)
        y = ops.causal_conv_update(on_device, storage[:, 1], *args, wide[:, :channels])
        cpu = ops.causal_conv_update(x, cpu_windows, weight, bias, slots, activation)
        want, want_windows = reference.causal_conv_update(x, want_windows, weight, bias, slots, activation)
        assert_agree(y, cpu, want, tolerance.output(width, 0, io), "y")
        assert same(storage[:, 1].cpu(), cpu_windows)
        assert same(cpu_windows, want_windows)
        assert not y[1].any()
        assert bool(wide[:, channels:].isnan().all())
    assert bool(storage[:, 0].isnan().all())


def test_conv_may_write_over_its_input():
    state, weight, slots = torch.randn(4, 600, 3).to(DEVICE), torch.randn(600, 4).to(DEVICE), index(3, -1, 0)
    again, x = state.clone(), torch.randn(3, 600).to(DEVICE)
    want = ops.causal_conv_update(x.clone(), again, weight, None, slots)
    assert torch.equal(ops.causal_conv_update(x, state, weight, None, slots, out=x), want)
    assert torch.equal(state, again)


@pytest.mark.parametrize("rows", [1, 2, 16, 600])
def test_cursors_and_flush_flags_equal_those_of_the_cpu(rows):
    gen = torch.Generator().manual_seed(rows)
    cursor = torch.randint(0, 8, (700, 2), generator=gen).int()
    slots = torch.randperm(700, generator=gen)[:rows].int()
    slots[::7] = -1 if rows > 1 else 5
    counts, lens = torch.randint(0, 10, (rows,), generator=gen).int(), torch.randint(-2, 40, (2 * rows,), generator=gen)
    for interval in (7, 1, 16, 0, -1, 1 << 40):
        for some in (lens[::2], lens[::2].int()):
            for index_ in (None, slots):
                want = ops.force_flush_mask(some, interval, index_)
                out = torch.full((rows, 3), 7, dtype=torch.int32, device=DEVICE)
                moved = torch.stack([some, some], 1).to(DEVICE)[:, 1]
                ops.force_flush_mask(moved, interval, None if index_ is None else index_.to(DEVICE), out[:, 1])
                assert torch.equal(out[:, 1].cpu(), want)
                assert bool((out[:, [0, 2]] == 7).all())
    force = ops.force_flush_mask(lens[::2], 3)
    for with_force in (None, force):
        for with_counts in (None, counts):
            ours, theirs = cursor.to(DEVICE), cursor.clone()
            args = [None if t is None else t.to(DEVICE) for t in (slots, with_force, with_counts)]
            assert torch.equal(ops.gather_cursors(ours[:, 1], args[0]).cpu(), ops.gather_cursors(theirs[:, 1], slots))
            ops.advance_cursors(ours[:, 1], args[0], 8, *args[1:])
            ops.advance_cursors(theirs[:, 1], slots, 8, with_force, with_counts)
            assert torch.equal(ours.cpu(), theirs)
