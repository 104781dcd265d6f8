"""The kernels on a GPU against the fp64 oracle, every kind, dtype, ring length and geometry."""

import itertools

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from tests.decode_case import KINDS, layer  # noqa: E402
from tests.kernels.gluon import case  # noqa: E402

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DIMS = [(2, 6, 128, 128), (3, 3, 64, 32), (5, 15, 32, 256), (1, 2, 256, 64)]


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("triton")
    import replayssm.kernels.gluon.backend as module

    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dims", "ring_len"), list(itertools.product(DIMS, (1, 2, 8, 16, 32))))
def test_replay(backend, kind, dims, ring_len):
    case.replay(backend, layer(kind, dims, ring_len), 2 * ring_len + 3, "cuda", strided=ring_len == 8)


@pytest.mark.parametrize("kind", ["gdn", "kda-bounded"])
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("io", [FP32, BF16, FP16])
def test_dtypes(backend, kind, state_dtype, io):
    case.replay(backend, layer(kind, DIMS[0], 16, io=io, state_dtype=state_dtype), 40, "cuda", strided=True)
    case.packed(backend, layer(kind, DIMS[0], io=io, state_dtype=state_dtype), 12, "cuda", strided=True)


SHAPES = [
    dict(rows=64, chunk=16, warps=4),
    dict(rows=128, chunk=64, warps=8),
    dict(rows=64, chunk=64, warps=4, staged=False),
    dict(rows=64, chunk=64, warps=4, staged=False, fold=2),
    dict(rows=16, chunk=16, warps=1, staged=False),
    dict(rows=64, chunk=16, warps=4, fold=0),
    dict(rows=64, chunk=16, warps=4, two_launches=True),
    dict(rows=64, chunk=16, warps=4, two_launches=True, pdl=True, evict="evict_first"),
    dict(rows=64, chunk=16, warps=4, scan=False),
]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launch_shapes(backend, kind, shape):
    case.replay(backend, layer(kind, DIMS[0], 16, io=BF16), 50, "cuda", params=backend.Launch(**shape))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_long_drift(backend, kind):
    case.replay(backend, layer(kind, (1, 1, 128, 128), 16), 4096, "cuda")


def test_more_programs_than_a_second_grid_axis_holds(backend):
    lay = layer("gdn", (1, 2, 32, 32), 4)
    rows = 33_000
    state = torch.randn(rows, 2, 32, 32, device="cuda")
    token = [x[0].to("cuda") for x in lay.tokens(1, rows)[:]]
    out = lay.empty_out(rows).to("cuda")
    want, _ = lay.serial(state[-2:].cpu(), type(lay.tokens(1, 1))(*(x[:, -2:] for x in lay.tokens(1, rows)[:])))
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    backend.packed_decode(*token, *case.constants(lay, "cuda"), state, out, slots, *case.gate(lay))
    torch.testing.assert_close(out[-2:, 0].cpu().double(), want[0], rtol=1e-4, atol=1e-4)


def test_a_graph_replays_a_period(backend):
    lay = layer("kda", DIMS[0], 8)
    pools = [torch.randn(r.shape, device="cuda") for r in lay.spec.ring_arrays(8, 4, "float32")]
    pools[2].abs_().neg_()
    state = torch.randn(lay.spec.state_array(4).shape, device="cuda")
    token = [x[0].to("cuda") for x in lay.tokens(1, 4)[:]]
    slots, pos = torch.arange(4, dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    outs = [lay.empty_out(4).to("cuda") for _ in range(2)]

    def step(out, state, pools):
        const = case.constants(lay, "cuda")
        backend.replay_decode(*token, *const, state, *pools, out, slots, pos, None, *case.gate(lay))
        pos.add_(1).remainder_(8)

    eager = state.clone(), [p.clone() for p in pools]
    for _ in range(9):
        step(outs[0], *eager)
    pos.zero_()
    kept = state.clone(), [p.clone() for p in pools]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(outs[1], state, pools)
    pos.zero_()
    state.copy_(kept[0])
    for p, k in zip(pools, kept[1], strict=True):
        p.copy_(k)
    for _ in range(9):
        graph.replay()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(eager[0], state)
