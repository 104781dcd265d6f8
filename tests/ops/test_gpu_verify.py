"""On a GPU: windows and their commits against the fp64 reference, in graphs, and over long runs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from replayssm import ops, reference
from tests import tolerance
from tests.decode_case import KINDS, NAN, Pool, int32, layer
from tests.ops.gpu_case import BF16, DEVICE, DIMS, FP16, FP32, GPU, captured, index, no_host_sync
from tests.ops.test_op_commit import LAYERS, LENGTHS, SLOTS, Packed
from tests.step_case import filled_pool, same
from tests.verify_case import Run, empty_out, inputs, limits, step, verify

pytestmark = GPU
KIND = pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])
GLUON, PORTABLE = (2, 6, 128, 128), (1, 3, 33, 7)


@pytest.fixture(autouse=True)
def release_memory():
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [*DIMS, (1, 4, 64, 128), (2, 2, 128, 64)])
@pytest.mark.parametrize(("ring_len", "tokens"), [(1, 1), (4, 3), (8, 5), (16, 4), (32, 8)])
def test_every_cursor_and_length(kind, dims, ring_len, tokens):
    """Rows of 0 to T tokens side by side at every cursor, a full ring too, with and without forced flush."""
    cases = list(itertools.product(range(ring_len + 1), range(tokens + 1), (0, 5)))
    cases = random.Random(ring_len).sample(cases, min(len(cases), 40))
    n, lengths, force = (int32(*column) for column in zip(*cases, strict=True))
    slots = torch.randperm(len(cases), generator=torch.Generator().manual_seed(1)).int()
    slots[3::11] = -1
    step(layer(kind, dims, ring_len, device=DEVICE), slots, n, lengths, tokens, force)


@KIND
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("io", [FP32, BF16, FP16])
@pytest.mark.parametrize("dims", [GLUON, PORTABLE])
def test_dtypes(kind, io, state_dtype, dims):
    lay = layer(kind, dims, ring_len=8, io=io, state_dtype=state_dtype, device=DEVICE)
    step(lay, int32(3, 0, -1, 5, 1), int32(0, 6, 99, 4, 7), int32(4, 4, 2, 3, 1), 4)


@KIND
@pytest.mark.parametrize("dims", [GLUON, PORTABLE])
@pytest.mark.parametrize("ring_len", [3, 8, 16])
def test_windows_and_plain_steps_take_turns(kind, dims, ring_len):
    lay, rng = layer(kind, dims, ring_len=ring_len, device=DEVICE), random.Random(ring_len)
    run, tokens = Run(lay, int32(4, 1, 2, 7), 40), min(4, ring_len - 1)
    while any(map(run.left, range(4))):
        if rng.random() < 0.3:
            run.decode()
            continue
        lengths = [rng.choice((0, 1, tokens, rng.randint(0, tokens))) for _ in range(4)]
        accepted = [rng.choice((0, m, rng.randint(0, m))) for m in lengths]
        run.verify(tokens, lengths, accepted, int32(*(int(rng.random() < 0.1) for _ in range(4))))
    run.check(tokens)


@KIND
@pytest.mark.parametrize("dims", [GLUON, PORTABLE])
@pytest.mark.parametrize("gate", [float("inf"), 1e4, -float("inf")])
def test_extreme_gates(kind, dims, gate):
    run = Run(layer(kind, dims, ring_len=8, device=DEVICE), int32(2, 0, 1), 20)
    for at in (1, 4, 6, 9):
        run.stream.a[at] = gate
        run.stream.a[at + 5, :, 0] = gate
    for lengths, accepted in (([3] * 3, [3, 2, 3]), ([4] * 3, [4, 4, 1]), ([4] * 3, [4] * 3), ([4] * 3, [4] * 3)):
        run.verify(4, lengths, accepted)
    run.check(4)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", [(1, 2, 128, 128), (1, 2, 96, 40)])
def test_drift_over_4096_tokens_is_that_of_plain_replay(kind, dims):
    """Windows of four drafts and one token, kept at random: the state stays as close to fp64 as decoded one by one."""
    lay, rng = layer(kind, dims, ring_len=16, device=DEVICE), random.Random(11)
    lay.A_log.fill_(-4.0)  # decay near 1: the state remembers hundreds of steps
    errors = []
    for windows in (True, False):
        run = Run(lay, int32(1, 0), 4096)
        while any(map(run.left, range(2))):
            if windows:
                run.verify(5, [5, rng.choice((1, 5))], [rng.randint(0, 5), rng.randint(0, 1)])
            else:
                run.decode()
        want, states = run.truth()
        tolerance.assert_close(run.outs, want, limits(lay, 5)[0] + 2e-5, "outputs")
        errors.append(tolerance.relative_error(run.states(), states))
    assert errors[0] <= 2 * errors[1] + tolerance.eps(FP32), errors
    assert errors[0] <= 2e-5, errors


@KIND
@pytest.mark.parametrize("dims", [(1, 4, 64, 64), PORTABLE])
@pytest.mark.parametrize("poison", [NAN, 1e30])
def test_poison_changes_no_bit(kind, dims, poison):
    lay = layer(kind, dims, 7, device=DEVICE)
    slots, cursors, lengths = int32(4, -1, 1, 2, 0), int32(2, 99, 5, 0, 3), int32(3, 4, 4, 0, 1)
    results = []
    for fill in (poison, 0.0):
        pool, window = filled_pool(lay, slots, cursors.clamp_max(7), 6, fill), []
        for x in inputs(lay, 5, 4):
            wide = torch.full((7, 5, *x.shape[2:-1], x.shape[-1] + 5), fill, device=DEVICE)
            inner = wide[1:-1, :-1, ..., 2:-3]
            inner.copy_(x)
            for row, slot in enumerate(slots.tolist()):
                inner[row, int(lengths[row]) if slot >= 0 else 0 :] = fill
            window.append(inner)
        frame = torch.full((7, 5, *empty_out(lay, 1, 1).shape[2:]), fill, device=DEVICE)
        out = verify(lay, pool, tuple(window), slots, cursors, lengths, out=frame[1:6, 1:])
        for edge in (frame[[0, 6]], frame[1:6, 0]):
            assert same(edge, torch.full_like(edge, fill)), "wrote outside the output"
        ops.flush(*pool.tensors, slots.to(DEVICE), index(5, 99, 4, 0, 4))
        results.append((out, pool.initial_state[[4, 1, 2, 0]]))
    for a, b in zip(*results, strict=True):
        assert bool(a.isfinite().all())
        assert same(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(2, 4, 64, 32), PORTABLE])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("strided", [True, False])
def test_strategies_without_a_ring(kind, dims, state_dtype, strided):
    """Snapshots, then the inputs run again, then records folded: all layers of a commit in one launch."""
    cases = [Packed(kind, dims=dims, state_dtype=state_dtype, strided=strided, device=DEVICE) for _ in range(3)]
    snapshots = torch.full((LAYERS, len(SLOTS), 4, *cases[0].state.shape[2:]), NAN, dtype=state_dtype, device=DEVICE)
    before = cases[0].state.clone()
    cases[0].check_outputs(cases[0].verify(snapshots))
    ops.commit_snapshot(cases[0].state, snapshots, cases[0].slots, cases[0].accepted)
    cases[1].check_outputs(cases[1].verify())
    lay = cases[1].lay
    stacked = [torch.stack(x) for x in zip(*cases[1].windows, strict=True)]
    weights = [x.expand(LAYERS, *x.shape) for x in (lay.A_log, lay.dt_bias)]
    ops.commit_kv_replay(*stacked, *weights, cases[1].state, cases[1].slots, cases[1].accepted, **lay.gate_args)
    third = cases[2]
    ring = [torch.full((LAYERS, *x.shape), NAN, device=DEVICE) for x in lay.spec.ring_arrays(4, 6)]
    for i, window in enumerate(third.windows):
        pool = Pool(layer(kind, dims, 4, state_dtype=state_dtype, device=DEVICE), 6)
        pool.initial_state, pool.d_cache, pool.k_cache, pool.g_cache = (x[i] for x in (third.state, *ring))
        verify(third.lay, pool, window, SLOTS, torch.zeros_like(SLOTS), LENGTHS)
    ops.commit_fold(third.state, *ring, third.slots, third.accepted, lay.l2norm)
    for case in cases:
        case.check_states(before.clone())


@pytest.mark.parametrize(("width", "extra", "held"), [(4, 0, BF16), (4, 2, FP32), (2, 1, FP16), (1, 0, FP32)])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [33, 2064])
def test_conv_windows_roll_back(width, extra, held, channels_last, channels):
    gen, slots = torch.Generator().manual_seed(width), int32(3, -1, 0, 5)
    state = torch.randn(2, 6, channels, width - 1 + extra, generator=gen).to(held)
    state = state.mT.contiguous().mT if channels_last else state
    weight, bias = torch.randn(channels, width, generator=gen), torch.randn(channels, generator=gen)
    x, lengths, kept = torch.randn(2, 4, 5, channels, generator=gen), int32(5, 2, 1, 4), int32(5, 1, 0, 2)
    x[:, 1], x[:, 2, 1:], x[:, 3, 4:] = NAN, NAN, NAN
    ours = state.to(DEVICE, copy=True)
    for i in range(2):
        args = [x[i], state[i], weight, bias if extra else None, slots, lengths]
        y = ops.causal_conv_verify(*(t if t is None else t.to(DEVICE) for t in args))
        tolerance.assert_close(y.cpu(), reference.causal_conv_verify(*args), tolerance.output(width, 0), "y")
    ops.commit_conv(ours, x.to(DEVICE), slots.to(DEVICE), kept.to(DEVICE))
    for i in range(2):
        assert same(ours[i].cpu(), reference.commit_conv(state[i], x[i], slots, kept))


class Steps:
    """Verify steps of two layers with conv, cursors and commits, from static inputs: what an engine captures."""

    def __init__(self, dims, device):
        self.slots, self.cursor = int32(2, -1, 0).to(device), torch.zeros(4, dtype=torch.int32, device=device)
        self.lengths, self.kept = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
        self.layers, self.raw, self.now, self.outs = [], [], [], []
        width = layer("gdn", dims).spec.qkv_dim
        self.conv = torch.zeros(2, 4, width, 3, device=device)
        gen = torch.Generator().manual_seed(3)
        self.weight = torch.randn(width, 4, generator=gen).to(device)
        self.window = torch.zeros(2, 3, 4, width, device=device)
        for i, kind in enumerate(("gdn", "kda")):
            lay = layer(kind, dims, 8, device=device)
            pool = Pool(lay, 4)
            pool.place(int32(2, 0).to(device), lay.state(2, seed=i))
            self.layers.append(pool)
            self.raw.append(inputs(lay, 3, 24, seed=i))
            self.now.append([x[:, :4].clone() for x in self.raw[-1][1:]])
            self.outs.append(empty_out(lay, 3, 4))
        self.start = [x.clone() for x in self.mutable()]

    def mutable(self):
        return [self.cursor, self.conv, *(x for pool in self.layers for x in pool.tensors)]

    def step(self):
        pos = ops.gather_cursors(self.cursor, self.slots)
        for i, pool in enumerate(self.layers):
            lay = pool.layer
            mixed = ops.causal_conv_verify(self.window[i], self.conv[i], self.weight, None, self.slots, self.lengths)
            ops.fused_recurrent_linear_replayssm_verify(
                mixed, *self.now[i], lay.A_log, lay.dt_bias, None, *pool.tensors, self.outs[i], self.slots, pos,
                self.lengths, **lay.gate_args,
            )  # fmt: skip
        ops.commit_cursors(self.cursor, self.slots, 8, self.lengths, self.kept)
        ops.commit_conv(self.conv, self.window, self.slots, self.kept)

    def run(self, step):
        for x, old in zip(self.mutable(), self.start, strict=True):
            x.copy_(old)
        results = []
        for t, (lengths, kept) in enumerate((([4, 0, 4], [4, 0, 2]), ([3, 4, 1], [1, 0, 1]), ([4] * 3, [4, 0, 0])) * 2):
            self.lengths.copy_(int32(*lengths))
            self.kept.copy_(int32(*kept))
            for i, (x, a, b) in enumerate(self.raw):
                self.window[i].copy_(x[:, 4 * t : 4 * t + 4])
                self.now[i][0].copy_(a[:, 4 * t : 4 * t + 4])
                self.now[i][1].copy_(b[:, 4 * t : 4 * t + 4])
            step()
            results.append([x.cpu().clone() for x in (*self.outs, self.cursor, self.conv)])
        return results


@pytest.mark.parametrize("dims", [(2, 4, 64, 64), PORTABLE])
def test_steps_in_a_graph_equal_eager_ones_and_the_cpu(dims):
    ours, cpu = Steps(dims, DEVICE), Steps(dims, "cpu")
    eager = ours.run(ours.step)
    graph = ours.run(captured(ours.step))
    with no_host_sync():
        ours.step()
    theirs = cpu.run(cpu.step)
    for a, b, c in zip(eager, graph, theirs, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))
        assert torch.equal(a[2], c[2]), "cursors"
        tolerance.assert_close(a[3], c[3], 1e-6, "conv windows")
        for x, y in zip(a[:2], c[:2], strict=True):
            tolerance.assert_close(x, y, 2 * limits(cpu.layers[0].layer, 4)[0] + 4 * tolerance.output(4, 0), "outputs")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_snapshots_beyond_32_bit(kind):
    """A buffer of more than 2**31 elements: the last row's snapshots lie past the limit."""
    if DEVICE == "cpu":
        pytest.skip("several gigabytes")
    lay, rows = layer(kind, (8, 32, 128, 128), io=BF16, state_dtype=BF16, device=DEVICE), 1050
    state = torch.zeros(2, 32, 128, 128, dtype=BF16, device=DEVICE)
    snapshots = torch.zeros(rows, 4, 32, 128, 128, dtype=BF16, device=DEVICE)
    slots = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    slots[-1] = 1
    window, lengths = inputs(lay, rows, 4), torch.full_like(slots, 4)
    out = empty_out(lay, rows, 4)
    ops.fused_recurrent_linear_packed_verify(
        *window, lay.A_log, lay.dt_bias, None, state, snapshots, out, slots, lengths, **lay.gate_args
    )
    ops.commit_snapshot(state, snapshots, slots, lengths - 1)
    tokens = type(lay.tokens(1, 1))(*(x[-1:, :3].transpose(0, 1) for x in window))
    want = lay.serial(torch.zeros(1, 32, 128, 128), tokens)[1]
    tolerance.assert_close(state[1].cpu(), want[0], tolerance.state(128, 8, BF16), "state")
    assert not state[0].any()
