"""The kernels' indices, masks and formulas, run by `emulator` on the CPU: every kind, fold and launch shape."""

import pytest
import torch

from tests.decode_case import KINDS, layer
from tests.kernels.gluon import case
from tests.kernels.gluon.emulator import emulated

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def backend():
    with emulated() as module:
        yield module


SHAPES = {
    "registers": dict(rows=32, chunk=32, warps=1, staged=False),
    "chunks": dict(rows=32, chunk=16, warps=1, staged=False),
    "staged": dict(rows=32, chunk=16, warps=1),
    "tensor cores": dict(rows=16, chunk=16, warps=1, staged=False, fold=2),
    "fold later": dict(rows=32, chunk=16, warps=1, fold=0),
    "two launches": dict(rows=32, chunk=16, warps=1, two_launches=True),
    "two launches, fold later": dict(rows=32, chunk=32, warps=1, two_launches=True, fold=0, pdl=True),
    "no scan": dict(rows=32, chunk=32, warps=1, scan=False),
}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_shape_equals_the_oracle(backend, shape, kind):
    params = backend.Launch(**SHAPES[shape])
    case.replay(backend, layer(kind, (1, 2, 32, 32), 3), 7, params=params)


@pytest.mark.parametrize(
    ("kind", "dims", "ring_len", "options"),
    [
        ("gdn-beta2", (3, 3, 64, 32), 5, {}),
        ("gdn", (1, 1, 32, 32), 20, {}),
        ("gdn", (1, 2, 32, 64), 1, {"l2norm": False}),
        ("gdn", (1, 3, 32, 32), 2, {"io": BF16, "state_dtype": BF16}),
        ("kda-bounded", (2, 4, 32, 64), 4, {"l2norm": False}),
        ("kda", (1, 1, 64, 32), 18, {}),
        ("kda", (1, 1, 32, 32), 4, {"io": BF16, "state_dtype": FP16}),
    ],
)
def test_table_launch_on_other_geometries_with_strided_inputs(backend, kind, dims, ring_len, options):
    case.replay(backend, layer(kind, dims, ring_len, **options), ring_len + 3, strided=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staged", [True, False])
def test_packed_equals_the_oracle(backend, kind, staged):
    params = backend.Launch(rows=32, chunk=16, warps=1, staged=staged)
    case.packed(backend, layer(kind, (1, 3, 32, 64)), 4, strided=True, params=params)


def test_state_past_the_fp16_range_saturates(backend):
    lay = layer("gdn", (1, 1, 32, 32), 1, state_dtype=FP16)
    state = torch.full((1, 1, 32, 32), 6e4, dtype=FP16)
    mixed, a, b = (x[0] for x in lay.tokens(1, 1)[:])
    mixed = mixed * 1e6
    out = lay.empty_out(1)
    args = (mixed, torch.full_like(a, -50.0), b, *case.constants(lay, "cpu"), state, out, torch.zeros(1).int())
    backend.packed_decode(*args, False, False, None, 1.0)
    assert bool(torch.isfinite(state).all())
    assert float(state.float().abs().max()) == 65504.0


def test_flush_of_several_layers(backend):
    lay = layer("kda", (1, 2, 32, 32), 4)
    pools = [lay.spec.state_array(3).shape, *(r.shape for r in lay.spec.ring_arrays(4, 3, "float32"))]
    gen = torch.Generator().manual_seed(2)
    state, d, k, g = (torch.randn(2, *shape, generator=gen) for shape in pools)
    g = -g.abs()
    slots, pos = torch.tensor([2, -1, 0]).int(), torch.tensor([4, 4, 0]).int()
    want = [x.clone() for x in state]
    from replayssm import reference

    want = [reference.flush(*one, slots, pos) for one in zip(state, d, k, g, strict=True)]
    backend.flush(state, d, k, g, slots, pos, True)
    torch.testing.assert_close(state, torch.stack(want), rtol=1e-5, atol=1e-5)


def test_a_wrong_kernel_is_noticed(backend, monkeypatch):
    from replayssm.kernels.gluon import blocks

    monkeypatch.setattr(blocks, "LOG_DECAY_FLOOR", -0.1)
    with pytest.raises(AssertionError, match="relative error"):
        case.replay(backend, layer("gdn", (1, 2, 32, 32), 3), 5)


def test_the_table_fits_every_geometry(backend):
    table = backend.launch
    for rows in (table.REPLAY, table.PACKED):
        for (kind, size), entries in rows.items():
            assert entries[-1][0] is None
            for batch in (1, 16, 17, 5000):
                for k_dim in (32, 64, 128, 256):
                    for v_dim in (32, 64, 128, 256):
                        p = table.choose(rows, kind, size, batch, v_dim, k_dim)
                        assert v_dim % p.rows == 0 == p.rows % p.chunk
                        lanes_v = 32 // min(8, k_dim * size // 16)
                        assert p.chunk % (lanes_v * p.warps) == 0
                        assert not p.staged or p.rows * k_dim * size <= 96 * 1024


def test_supports_names_the_reason(backend):
    lay = layer("gdn", (1, 2, 48, 32))
    assert "K = 48" in backend.supports(lay.state(1), lay.tokens(1, 1).mixed_qkv[0])
    lay = layer("gdn", (1, 2, 32, 32))
    assert "cpu" in backend.supports(lay.state(1), lay.tokens(1, 1).mixed_qkv[0])
