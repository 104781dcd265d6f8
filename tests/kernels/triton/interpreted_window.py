"""Windows and their commits in the Triton interpreter, against the fp64 reference."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import tests.kernels.triton.interpreter  # noqa: F401 # isort: skip - before anything that imports Triton

from replayssm import ops, reference
from replayssm.kernels import torch_backend
from replayssm.kernels.triton import backend
from tests import tolerance
from tests.decode_case import NAN, Pool, int32, layer
from tests.ops.test_op_commit import ACCEPTED, LAYERS, SLOTS, Packed
from tests.step_case import filled_pool, same
from tests.verify_case import Run, inputs, limits, step, verify

INF = math.inf
KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("kind", "ring_len", "tokens"),
    [("gdn", 1, 1), ("kda", 2, 2), ("gdn-beta2", 3, 2), ("kda-bounded", 8, 3), ("gdn", 8, 5), ("kda", 8, 5)],
)
def test_cursors_and_lengths(kind, ring_len, tokens):
    """Rows of 0 to T tokens at every cursor, a full ring too, with and without forced flush."""
    cases = list(itertools.product(range(ring_len + 1), range(tokens + 1), (0, 5)))
    cases = random.Random(ring_len).sample(cases, min(len(cases), 14))
    n, lengths, force = (int32(*column) for column in zip(*cases, strict=True))
    slots = torch.randperm(len(cases), generator=torch.Generator().manual_seed(1)).int()
    step(layer(kind, (1, 2, 6, 5), ring_len), slots, n, lengths, tokens, force)


@KIND
@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (3, 3, 33, 7), (5, 5, 96, 24), (1, 2, 256, 3), (1, 1, 5, 250)])
def test_head_counts_and_dims(kind, dims):
    step(layer(kind, dims, ring_len=4), int32(2, 0), int32(2, 1), int32(3, 2), 3)


@KIND
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
def test_dtypes(kind, state_dtype):
    for io in (BF16, FP16):
        lay = layer(kind, (1, 2, 12, 20), ring_len=5, io=io, state_dtype=state_dtype)
        step(lay, int32(3, -1, 1), int32(3, 99, 1), int32(3, 2, 2), 3)


@KIND
def test_windows_and_plain_steps_take_turns(kind):
    lay, rng = layer(kind, (1, 2, 6, 5), ring_len=5), random.Random(2)
    run = Run(lay, int32(2, 0), 13)
    while any(map(run.left, range(2))):
        if rng.random() < 0.3:
            run.decode()
            continue
        lengths = [rng.choice((1, 4, 3)) for _ in range(2)]
        run.verify(4, lengths, [rng.choice((0, m, m)) for m in lengths])
    run.check(4)


@pytest.mark.parametrize(("kind", "gate"), [("gdn", INF), ("kda", INF), ("kda", -INF)])
def test_extreme_gates(kind, gate):
    run = Run(layer(kind, (1, 2, 6, 5), ring_len=8), int32(2, 0), 11)
    for at in (1, 4, 6):
        run.stream.a[at] = gate
    for kept in (3, 2, 4, 2):
        run.verify(4, [4, 4], [kept, kept])
    run.check(4)


@KIND
@pytest.mark.parametrize("poison", [NAN, 1e30])
def test_poison_changes_no_bit(kind, poison):
    lay, slots, cursors, lengths = layer(kind, (1, 2, 6, 5), 6), int32(3, -1, 1), int32(2, 99, 4), int32(3, 1, 2)
    results = []
    for fill in (poison, 0.0):
        pool, window = filled_pool(lay, slots, cursors.clamp_max(6), 5, fill), []
        for x in inputs(lay, 3, 3):
            wide = torch.full((5, 4, *x.shape[2:-1], x.shape[-1] + 5), fill)
            inner = wide[1:-1, :-1, ..., 2:-3]
            inner.copy_(x)
            inner[1], inner[2, 2:] = fill, fill
            window.append(inner)
        buffer = torch.full((3, 4, 2, 5), fill)
        out = verify(lay, pool, tuple(window), slots, cursors, lengths, out=buffer[:, 1:])
        assert same(buffer[:, 0], torch.full_like(buffer[:, 0], fill))
        ops.flush(*pool.tensors, slots, int32(5, 99, 2))
        results.append((out, pool.initial_state[[3, 1]]))
    for a, b in zip(*results, strict=True):
        assert bool(a.isfinite().all())
        assert same(a, b)


@pytest.mark.parametrize(("kind", "state_dtype", "strided"), [("gdn", FP32, True), ("kda-bounded", BF16, False)])
def test_strategies_without_a_ring(kind, state_dtype, strided):
    """Snapshots, then the inputs run again, then records folded: all layers of a commit in one launch."""
    options = dict(dims=(1, 2, 6, 5), state_dtype=state_dtype, strided=strided)
    case, other = Packed(kind, **options), Packed(kind, **options)
    snapshots = torch.full((LAYERS, len(SLOTS), 4, *case.state.shape[2:]), NAN, dtype=state_dtype)
    case.check_outputs(case.verify(snapshots))
    before = case.state.clone()
    ops.commit_snapshot(case.state, snapshots, SLOTS, ACCEPTED)
    case.check_states(before)
    other.check_outputs(other.verify())
    lay, before = other.lay, other.state.clone()
    stacked = [torch.stack(x) for x in zip(*other.windows, strict=True)]
    weights = [x.expand(LAYERS, *x.shape).contiguous() for x in (lay.A_log, lay.dt_bias)]
    ops.commit_kv_replay(*stacked, *weights, other.state, SLOTS, ACCEPTED, **lay.gate_args)
    other.check_states(before)
    assert same(case.state, other.state), "a snapshot and a second run are the same numbers"


@KIND
def test_one_ring_for_all_backends(kind):
    """Windows by this backend and by torch in turn, with plain steps between."""
    lay, slots = layer(kind, (2, 4, 6, 5), ring_len=8), int32(1, 0)
    pool, state, tokens = Pool(lay, 3), lay.state(2), lay.tokens(12, 2)
    pool.place(slots, state)
    cursor, outs = pool.cursor, []
    for i, t in enumerate(range(0, 12, 3)):
        module = (backend, torch_backend)[i % 2]
        pos, out = module.gather_cursors(cursor, slots), torch.full((2, 3, 4, 5), NAN)
        window = [x[t : t + 3].transpose(0, 1) for x in tokens[:]]
        three, flags = int32(3, 3), lay.gate_args.values()
        module.replay_verify(
            *window, lay.A_log, lay.dt_bias, 6**-0.5, *pool.tensors, out, slots, pos, three, None, *flags
        )  # fmt: skip
        module.commit_cursors(cursor, slots, 8, three, three, None)
        outs.append(out.transpose(0, 1))
    want, final = lay.serial(state, tokens)
    tolerance.assert_close(torch.cat(outs), want, limits(lay, 3)[0], "outputs")
    tolerance.assert_close(pool.flushed(slots), final, tolerance.state(6, 8), "state")


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("with_force", [False, True])
def test_cursors(rows, with_force):
    gen = torch.Generator().manual_seed(rows)
    slots = torch.randperm(rows, generator=gen).int()
    slots[torch.rand(rows, generator=gen) < 0.3] = -1
    cursor = torch.randint(0, 9, (rows,), generator=gen).int()
    lengths = torch.randint(0, 6, (rows,), generator=gen).int()
    kept = (lengths * torch.rand(rows, generator=gen)).int()
    force = torch.randint(0, 2, (rows,), generator=gen).int() if with_force else None
    want = cursor.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            flag = with_force and bool(force[row])
            want[slot] = reference.commit_cursor(int(cursor[slot]), int(lengths[row]), int(kept[row]), 8, flag)
    ops.commit_cursors(cursor, slots, 8, lengths, kept, force)
    assert torch.equal(cursor, want)


CONVS = [(4, 0, FP32), (4, 2, BF16), (2, 1, FP16), (1, 0, FP32), (1, 2, FP32)]


@pytest.mark.parametrize(("width", "extra", "held"), CONVS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_conv_windows_roll_back(width, extra, held, channels_last):
    gen, slots = torch.Generator().manual_seed(width), int32(3, -1, 0, 5)
    state = torch.randn(2, 6, 33, width - 1 + extra, generator=gen).to(held)
    state = state.mT.contiguous().mT if channels_last else state
    weight, bias = torch.randn(33, width, generator=gen), torch.randn(33, generator=gen)
    x, lengths, kept = torch.randn(2, 4, 5, 66, generator=gen)[..., ::2], int32(5, 2, 1, 4), int32(5, 1, 0, 2)
    x[:, 1], x[:, 2, 1:], x[:, 3, 4:] = NAN, NAN, NAN
    before = state.clone()
    for i in range(2):
        args = x[i], state[i], weight, bias if extra else None, slots, lengths, "silu" if extra else None
        y = ops.causal_conv_verify(*args)
        tolerance.assert_close(y, reference.causal_conv_verify(*args), tolerance.output(width, 0), "y")
    assert same(state, before)
    ops.commit_conv(state, x, slots, kept)
    for i in range(2):
        assert same(state[i], reference.commit_conv(before[i], x[i], slots, kept))


@KIND
def test_empty_batches(kind):
    lay, none = layer(kind, (1, 2, 6, 5)), int32()
    window, pool = inputs(lay, 0, 3), Pool(lay, 2, 0.5)
    flags = lay.gate_args.values()
    args = (*window, lay.A_log, lay.dt_bias, 0.5)
    out = torch.empty(0, 3, 2, 5)
    backend.replay_verify(*args, *pool.tensors, out, none, none, none, None, *flags)
    backend.packed_verify(*args, pool.initial_state, None, out, none, none, *flags)
    backend.commit_kv_replay(*args[:-1], pool.initial_state, none, none, *flags)
    backend.commit_snapshot(pool.initial_state, torch.empty(0, 3, 2, 5, 6), none, none)
    backend.commit_cursors(pool.cursor, none, 8, none, none, None)
    conv = torch.empty(2, 7, 3)
    backend.commit_conv(conv, torch.empty(0, 3, 7), none, none)
    x = torch.empty(0, 3, 7)
    backend.causal_conv_verify(x, conv, torch.empty(7, 4), None, none, none, None, x)
