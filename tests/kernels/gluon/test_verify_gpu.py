"""On a GPU: every launch shape of the kernel of windows, and that tensor cores cost no accuracy to speak of."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from replayssm import reference
from tests import tolerance
from tests.decode_case import int32, layer
from tests.step_case import filled_pool
from tests.verify_case import inputs, step, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [
    dict(chunk=64, buffers=1, warps=4),
    dict(chunk=64, buffers=2, warps=4, maxnreg=168),
    dict(chunk=64, buffers=1, warps=4, tensor=False),
    dict(chunk=32, buffers=3, warps=2),
    dict(chunk=128, buffers=1, warps=8, maxnreg=128),
]


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("triton")
    from replayssm.kernels.gluon import backend

    if (why := backend.supports(torch.empty(1, 1, 128, 128, device="cuda"))) is not None:
        pytest.skip(why)
    return backend


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
def test_every_launch_shape(backend, shape, kind, state_dtype):
    cases = list(itertools.product(range(9), range(5), (0, 5)))
    cases = random.Random(1).sample(cases, 30)
    n, lengths, force = (int32(*column) for column in zip(*cases, strict=True))
    slots = torch.randperm(len(cases), generator=torch.Generator().manual_seed(1)).int()
    slots[::7] = -1
    lay = layer(kind, (2, 4, 128, 128), 8, io=BF16, state_dtype=state_dtype, device="cuda")
    params = backend.Window(**shape)
    step(lay, slots, n, lengths, 4, force, backend=backend, params=params)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
def test_pieces_on_tensor_cores_are_as_good_as_plain_multiply_adds(backend, kind, state_dtype):
    """Root mean squares of the errors of d, which holds all readouts: within half as much again, and of fp32 size."""
    lay = layer(kind, (4, 8, 128, 128), 8, state_dtype=state_dtype, device="cuda")
    slots, cursors, lengths = torch.arange(16).int(), torch.full((16,), 3).int(), torch.full((16,), 4).int()
    window, errors = inputs(lay, 16, 4), []
    for tensor in (True, False):
        pool = filled_pool(lay, slots, cursors, 16)
        before = [x.cpu() for x in pool.tensors]
        params = backend.Window(64, 1, 4, tensor=tensor)
        verify(lay, pool, window, slots, cursors, lengths, backend=backend, params=params)
        args = (*(x.cpu() for x in (*window, lay.A_log, lay.dt_bias)), None, *(x.double() for x in before))
        _, want = reference.ring_verify(*args, slots, cursors, lengths, **lay.gate_args)
        new = want.d_cache[:, :, 3:7]
        errors.append(float((pool.d_cache.cpu()[:, :, 3:7] - new).square().mean().sqrt() / new.square().mean().sqrt()))
    assert errors[0] <= 1.5 * errors[1] + tolerance.eps(FP32), errors
    assert errors[0] <= 8 * tolerance.eps(FP32), errors
