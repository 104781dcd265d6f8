"""The kernels on a GPU against the fp64 oracle: every row of the launch table, other geometries, and what repeats."""

from functools import cache

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from replayssm.kernels.gluon import launch  # noqa: E402
from tests.decode_case import Tokens, int32, layer  # noqa: E402
from tests.kernels.gluon import case  # noqa: E402

DEVICE = "cuda"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DIMS = {"gdn": (16, 32, 128, 128), "kda": (32, 32, 128, 128)}
STATE = {4: FP32, 2: BF16}
SLOTS = int32(-1, 4, 0, 9, -1, 2, 7, 1, -1)
STEPS = 35  # more than two periods of a ring of 16, four of a ring of 8


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("triton")
    from replayssm.kernels.gluon import backend

    return backend


def rows_of(table):
    """Each distinct row with its kind and state dtype."""
    rows = sorted({(key, row) for key, entries in table.items() for _, row in entries}, key=str)
    return [("kda" if is_kda else "gdn", STATE[size], row) for (is_kda, size), row in rows]


def streams(kind):
    return next(row for k, state, row in rows_of(launch.REPLAY) if k == kind and isinstance(row, launch.Stream))


REPLAY = [(8, *row) for row in rows_of(launch.REPLAY)] + [(16, *row) for row in rows_of(launch.REPLAY_LONG)]
HALF = [(8, kind, FP16, row) for kind, state, row in rows_of(launch.REPLAY) if state == BF16]


@pytest.mark.parametrize(("ring_len", "kind", "state", "row"), REPLAY + HALF, ids=str)
def test_replay_rows_of_the_table(backend, ring_len, kind, state, row):
    lay = layer(kind, DIMS[kind], ring_len, io=BF16, state_dtype=state)
    case.replay(backend, lay, STEPS, DEVICE, slots=SLOTS, params=row)


@pytest.mark.parametrize(("kind", "state", "row"), rows_of(launch.PACKED), ids=str)
def test_packed_rows_of_the_table(backend, kind, state, row):
    case.packed(backend, layer(kind, DIMS[kind], io=BF16, state_dtype=state), STEPS, DEVICE, slots=SLOTS, params=row)


@pytest.mark.parametrize(("kind", "state", "row"), rows_of(launch.PACKED), ids=str)
def test_packed_rows_with_padded_heads(backend, kind, state, row):
    lay = layer(kind, (2, 2, 96, 80), io=BF16, state_dtype=state)
    row = row.fit(80, 96, state.itemsize, 1)
    case.packed(backend, lay, 5, DEVICE, strided=True, slots=SLOTS, params=row)


LARGE = 300


@cache
def large_past(kind):
    lay = layer(kind, DIMS[kind], 8, io=BF16)
    return case.past(lay, lay.tokens(10, LARGE, 3), [0, 1, 4, 6, 149, 200, 297, 298])


@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize("kind", DIMS)
def test_a_large_batch_takes_the_stream(backend, kind, state):
    """Some rows against the oracle; of all, what may change and what may not."""
    lay = layer(kind, DIMS[kind], 8, io=BF16, state_dtype=state)
    heads = LARGE * lay.spec.num_v_heads
    assert isinstance(launch.replay(lay.spec.is_kda, state.itemsize, heads, 128, 128, 8), launch.Stream)
    slots = torch.randperm(LARGE + 1, generator=torch.Generator().manual_seed(3)).int()[:LARGE]
    slots[[5, 150, 299]] = -1
    case.replay(backend, lay, 10, DEVICE, slots=slots, known=large_past(kind))


# Sizes, layouts and ring lengths that the emulator cannot tell apart.
GEOMETRIES = [
    ("gdn", (2, 6, 128, 128), 1, {"strided": True}),
    ("gdn-beta2", (3, 3, 64, 32), 2, {}),
    ("kda", (5, 15, 32, 256), 8, {"strided": True}),
    ("kda-bounded", (1, 2, 256, 64), 16, {}),
    ("gdn", (1, 1, 32, 32), 64, {}),
    ("kda", (1, 3, 128, 128), 32, {"strided": True}),
    ("kda-bounded", (2, 6, 128, 128), 13, {"io": FP32, "state_dtype": FP16, "strided": True}),
    ("gdn", (2, 6, 64, 128), 16, {"io": FP16, "state_dtype": BF16}),
    ("gdn-beta2", (5, 5, 96, 192), 8, {"strided": True}),
    ("kda", (2, 6, 80, 48), 16, {"io": BF16, "state_dtype": BF16, "strided": True}),
    ("kda-bounded", (3, 3, 208, 112), 5, {"io": BF16, "state_dtype": FP16}),
    ("gdn", (2, 2, 256, 256), 8, {"io": BF16, "state_dtype": FP16, "l2norm": False}),
]


@pytest.mark.parametrize(("kind", "dims", "ring_len", "options"), GEOMETRIES, ids=str)
def test_other_geometries(backend, kind, dims, ring_len, options):
    options = dict(options)
    strided = options.pop("strided", False)
    lay = layer(kind, dims, ring_len, **options)
    steps = 4 if "l2norm" in options else min(2 * ring_len + 3, 40)
    case.replay(backend, lay, steps, DEVICE, strided)
    case.packed(backend, lay, 4, DEVICE, strided)


STREAMS = [
    ("gdn", (1, 2, 32, 64), 1, dict(rows=32, chunk=32, warps=4, stages=1, per_sm=1, workers=1), {}),
    ("kda", (2, 6, 64, 32), 5, dict(rows=32, chunk=16, warps=4, stages=3, per_sm=1), {"io": BF16}),
    ("kda-bounded", (1, 3, 128, 256), 19, dict(rows=64, chunk=64, warps=4, stages=2, per_sm=1), {"state_dtype": BF16}),
    ("gdn", (2, 2, 256, 64), 16, dict(rows=32, chunk=32, warps=4, stages=2, per_sm=2, workers=1), {"io": FP16}),
]


@pytest.mark.parametrize(("kind", "dims", "ring_len", "fields", "options"), STREAMS, ids=str)
def test_streams_of_other_geometries(backend, monkeypatch, kind, dims, ring_len, fields, options):
    """On a few multiprocessors, so that a program takes several tiles."""
    monkeypatch.setattr(backend, "multiprocessors", lambda device: 3)
    lay = layer(kind, dims, ring_len, **options)
    case.replay(backend, lay, 2 * ring_len + 3, DEVICE, strided=True, params=launch.Stream(**fields))


@pytest.mark.parametrize("form", ["stream", "fused"])
@pytest.mark.parametrize("kind", DIMS)
def test_no_drift(backend, kind, form):
    params = streams(kind) if form == "stream" else None
    lay = layer(kind, (1, 1, 128, 128), 8 if params else 16)
    case.replay(backend, lay, 4096, DEVICE, watch=False, params=params)


@pytest.mark.parametrize("kind", DIMS)
def test_extreme_gates(backend, kind):
    """Inputs that saturate softplus and sigmoid, decays of 0 and 1, -inf gates."""
    lay, steps = layer(kind, DIMS[kind], 8), 20
    lay.A_log[::2], lay.A_log[1::2] = -20.0, 3.0
    tokens, gen = lay.tokens(steps, len(SLOTS), 4), torch.Generator().manual_seed(1)
    extremes = torch.tensor([-float("inf"), -100.0, -20.0, 0.0, 1.0, 20.1, 89.0, 1e4, float("inf")])
    for x in (tokens.a, tokens.b):
        x.copy_(extremes[torch.randint(len(extremes), x.shape, generator=gen)])
    known = case.past(lay, tokens, case.owners(SLOTS))
    for params in (None, streams(kind)):
        case.replay(backend, lay, steps, DEVICE, slots=SLOTS, known=known, params=params)


def a_moment(kind, state, batch):
    """Rows at every cursor, padding at both ends, some flags."""
    lay = layer(kind, DIMS[kind], 8, io=BF16, state_dtype=state)
    slots = torch.arange(batch).flip(0).int()
    slots[[0, batch - 1]] = -1
    return lay, slots, torch.arange(batch).int() % 8, (torch.arange(batch).int() % 5 == 0).int(), DEVICE


@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize("kind", DIMS)
def test_a_step_repeats_bit_for_bit(backend, kind, state):
    """Many programs at once, twenty times: a race would show."""
    moment = case.moment(*a_moment(kind, state, 130))
    first = moment.step(backend)
    assert bool(first[0].isfinite().all())
    for _ in range(20):
        assert case.same(first, moment.step(backend))


@pytest.mark.parametrize("form", ["stream", "fused"])
@pytest.mark.parametrize("kind", DIMS)
def test_nothing_leaks_from_what_a_row_does_not_own(backend, kind, form):
    params = streams(kind) if form == "stream" else None
    case.assert_nothing_leaks(backend, *a_moment(kind, FP32, 24), params=params)


@pytest.mark.parametrize("op", ["packed", "replay"])
@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize("kind", DIMS)
def test_nothing_leaks_with_padded_heads(backend, kind, state, op):
    lay, slots = layer(kind, (1, 2, 96, 80), 5, io=BF16, state_dtype=state), int32(3, 0, -1, 1, 5, -1)
    cursor = int32(4, 0, -9, 2, 3, 7) if op == "replay" else torch.zeros(6).int()
    force = int32(0, 1, 1, 0, -1, 0) if op == "replay" else torch.zeros(6).int()
    case.assert_nothing_leaks(backend, lay, slots, cursor, force, DEVICE, op=op)


@pytest.mark.parametrize("form", ["stream", "fused"])
@pytest.mark.parametrize("kind", DIMS)
def test_steps_close_together(backend, kind, form):
    """A step reads what the one before has written. Waiting between them, or a graph of them, changes no bit."""
    params, length, batch, steps = streams(kind) if form == "stream" else None, 8, 16, 19
    start = case.moment(*a_moment(kind, FP32, batch))
    lay, weights = start.lay, case.constants(start.lay, DEVICE)
    tokens = lay.tokens(steps, batch, 8).on(DEVICE)
    force = (torch.rand(steps, batch, generator=torch.Generator().manual_seed(2)) < 0.15).int().to(DEVICE)
    cursors = [start.cursor]
    for t in range(steps):
        cursors.append((cursors[t] + 1) * ((cursors[t] + 1 < length) & (force[t] == 0)))

    def run(outs, pools, pause=lambda: None):
        for t in range(steps):
            args = *tokens[t], *weights, *pools, outs[t], start.slots, cursors[t], force[t], *case.gate(lay)
            backend.replay_decode(*args, params=params)
            pause()

    def fresh():
        return [lay.empty_out(batch).to(DEVICE) for _ in range(steps)], [x.clone() for x in start.pools]

    (outs, pools), (quick_outs, quick_pools), (graph_outs, graph_pools) = fresh(), fresh(), fresh()
    run(outs, pools, torch.cuda.synchronize)
    run(quick_outs, quick_pools)
    assert case.same([*outs, *pools], [*quick_outs, *quick_pools])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(graph_outs, graph_pools)
    assert case.same(graph_pools, start.pools), "a capture runs nothing"
    for _ in range(3):
        for x, y in zip(graph_pools, start.pools, strict=True):
            x.copy_(y)
        graph.replay()
        assert case.same([*outs, *pools], [*graph_outs, *graph_pools])


def test_more_programs_than_a_second_grid_axis_holds(backend):
    lay = layer("gdn", (1, 2, 32, 32), 4)
    rows = 33_000
    state = torch.randn(rows, 2, 32, 32, device=DEVICE)
    tokens = lay.tokens(1, rows)
    token = [x[0].to(DEVICE) for x in tokens[:]]
    out = lay.empty_out(rows).to(DEVICE)
    want, _ = lay.serial(state[-2:].cpu(), Tokens(*(x[:, -2:] for x in tokens[:])))
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    backend.packed_decode(*token, *case.constants(lay, DEVICE), state, out, slots, *case.gate(lay))
    torch.testing.assert_close(out[-2:, 0].cpu().double(), want[0], rtol=1e-4, atol=1e-4)
