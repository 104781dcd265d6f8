"""The kernel of windows run by `emulator` on the CPU: indices, masks, formulas and barriers, for every launch shape."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.decode_case import KINDS, NAN, int32, layer
from tests.kernels.gluon import tasks
from tests.kernels.gluon.emulator import emulated
from tests.step_case import filled_pool, same
from tests.verify_case import inputs, step, verify

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SMALL = (1, 2, 64, 64)


@pytest.fixture(scope="module")
def backend():
    with emulated() as module:
        yield module


@pytest.fixture(autouse=True)
def order(request):
    tasks.ORDER.seed(request.node.name)


SHAPES = {
    "whole head": dict(chunk=64, buffers=1, warps=4),
    "refilled": dict(chunk=16, buffers=3, warps=1),
    "one buffer": dict(chunk=32, buffers=1, warps=2),
    "more buffers than tiles": dict(chunk=32, buffers=5, warps=2),
}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("tensor", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_shape(backend, shape, tensor, kind):
    """Rows that append, fold, fold by force, have a full ring, no tokens, or are padding."""
    params = backend.Window(**SHAPES[shape], tensor=tensor)
    slots, cursors, lengths, force = int32(2, -1, 0, 1, 5, 4), int32(4, 9, 5, 8, 0, 3), int32(3, 2, 3, 0, 1, 2), None
    if tensor:
        force = int32(0, 1, 0, 0, 1, 3)
    step(layer(kind, SMALL, 8), slots, cursors, lengths, 3, force, backend=backend, params=params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ring_len", "tokens"), [(1, 1), (2, 2), (5, 4), (8, 5), (16, 8), (32, 4)])
def test_cursors_and_lengths(backend, kind, ring_len, tokens):
    cases = list(itertools.product(range(ring_len + 1), range(tokens + 1), (0, 5)))
    cases = random.Random(ring_len).sample(cases, min(len(cases), 8))
    n, lengths, force = (int32(*column) for column in zip(*cases, strict=True))
    slots = torch.randperm(len(cases), generator=torch.Generator().manual_seed(1)).int()
    step(layer(kind, (1, 1, 64, 64), ring_len), slots, n, lengths, tokens, force, backend=backend)


@pytest.mark.parametrize("dims", [(1, 3, 128, 64), (2, 2, 64, 128), (1, 1, 128, 128)])
@pytest.mark.parametrize(("io", "state_dtype"), [(BF16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP16)])
def test_geometries_and_dtypes(backend, dims, io, state_dtype):
    """Products in pieces of tf32 or bf16 leave errors of fp32."""
    for kind in ("gdn", "kda-bounded"):
        lay = layer(kind, dims, ring_len=8, io=io, state_dtype=state_dtype)
        step(lay, int32(1, -1, 2), int32(2, 99, 6), int32(3, 1, 3), 3, backend=backend)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_strong_gates_and_no_norm(backend, kind):
    lay, slots, cursors = layer(kind, SMALL, 8, l2norm=False), int32(2, 0, 1), int32(3, 6, 0)
    window, pool = inputs(lay, 3, 4), filled_pool(lay, slots, cursors, 4)
    window[0].mul_(0.1)
    pool.k_cache.mul_(0.1)
    window[1][0, 1], window[1][1, 0], window[1][2, 2] = float("inf"), 1e4, -float("inf")
    pool.g_cache[2, :, 1] = -200.0
    step(lay, slots, cursors, int32(4, 4, 4), 4, pool=pool, window=window, backend=backend)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("tensor", [True, False])
def test_poison_changes_no_bit(backend, kind, tensor):
    lay, slots, cursors, lengths = layer(kind, SMALL, 6), int32(3, -1, 1, 0), int32(2, 99, 4, 6), int32(3, 1, 2, 0)
    results, params = [], backend.Window(64, 1, 4, tensor=tensor)
    for fill in (NAN, 0.0):
        pool, window = filled_pool(lay, slots, cursors.clamp_max(6), 5, fill), []
        for x in inputs(lay, 4, 3):
            wide = torch.full((6, 4, *x.shape[2:-1], x.shape[-1] + 5), fill)
            inner = wide[1:-1, :-1, ..., 2:-3]
            inner.copy_(x)
            inner[1], inner[2, 2:], inner[3] = fill, fill, fill
            window.append(inner)
        buffer = torch.full((4, 4, 2, 64), fill)
        out = verify(
            lay, pool, tuple(window), slots, cursors, lengths, out=buffer[:, 1:], backend=backend, params=params
        )
        assert same(buffer[:, 0], torch.full_like(buffer[:, 0], fill))
        records = [cache[3, :, :5].clone() for cache in pool.tensors[1:]]
        results.append((out, pool.initial_state[[3, 1, 0]], *records))
    for a, b in zip(*results, strict=True):
        assert bool(a.isfinite().all())
        assert same(a, b)


def test_strided_pools(backend):
    lay, slots, cursors = layer("gdn", SMALL, 6), int32(2, 0), int32(4, 1)
    plain = filled_pool(lay, slots, cursors, 3, 0.0)
    strided, storage = plain.on("cpu"), {}
    for name in ("initial_state", "d_cache", "k_cache", "g_cache"):
        x = getattr(plain, name)
        storage[name] = torch.full((3, 2, *x.shape[1:]), NAN)
        storage[name][:, 1] = x
        setattr(strided, name, storage[name][:, 1])
    window = inputs(lay, 2, 3)
    got = [verify(lay, p, window, slots, cursors, int32(3, 2), backend=backend) for p in (plain, strided)]
    assert torch.equal(*got)
    for name, whole in storage.items():
        assert bool(whole[:, 0].isnan().all()), f"{name}: wrote between the slots"
        assert same(whole[:, 1], getattr(plain, name))


def test_no_rows_and_only_padding(backend):
    lay = layer("kda", SMALL, 4)
    pool = filled_pool(lay, int32(0), int32(2), 2)
    before = [x.clone() for x in pool.tensors]
    out = verify(lay, pool, inputs(lay, 2, 3), int32(-1, -5), int32(9, 9), int32(3, 3), backend=backend)
    assert not out.any()
    assert verify(lay, pool, inputs(lay, 0, 3), int32(), int32(), int32(), backend=backend).shape[0] == 0
    assert all(same(x, y) for x, y in zip(pool.tensors, before, strict=True))


def test_pieces_add_up_to_fp32():
    """What is lost of a product of two numbers cut into tf32 pieces is below two units of the last place of fp32."""
    from tests.kernels.gluon.emulator import tf32

    x, y = torch.randn(2, 10000, generator=torch.Generator().manual_seed(0))
    (a, b), (c, d) = ((high := tf32(v, half=True), tf32(v - high, half=True)) for v in (x, y))
    pieces = a.double() * c.double() + a.double() * d.double() + b.double() * c.double()
    exact = x.double() * y.double()
    assert float(((pieces - exact) / exact).abs().max()) < 3 * 2**-22
    one, two = x.bfloat16(), (x - x.bfloat16().float()).bfloat16()
    three = (x - one.float() - two.float()).bfloat16()
    error = one.double() + two.double() + three.double() - x.double()
    assert float((error / x.double()).abs().max()) <= 2**-24


def test_which_windows_it_takes(backend):
    state, out = torch.empty(2, 2, 128, 64), torch.empty(1, 4, 2, 128)
    assert backend.verifies(state, out, out, 8) is None
    assert "K = 96" in backend.verifies(torch.empty(2, 2, 128, 96), out, out, 8)
    assert "V = 32" in backend.verifies(torch.empty(2, 2, 32, 64), out, out, 8)
    assert "T = 9" in backend.verifies(state, torch.empty(1, 9, 1), out, 16)
    assert "L = 33" in backend.verifies(state, out, out, 33)
    assert "stride" in backend.verifies(torch.empty(2, 33000)[:, : 2 * 128 * 64].view(2, 2, 128, 64), out, out, 8)
