"""The kernel of windows compiles ahead of time, as it is really launched, and leaves the room it counts on."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Gluon needs triton >= 3.6")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set, so nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget

from replayssm.kernels.gluon import backend, launch
from tests.decode_case import Pool, layer
from tests.kernels.gluon import case
from tests.kernels.gluon.aot import compiled
from tests.kernels.gluon.test_gluon_compile import (
    BF16,
    FP16,
    FP32,
    HEADS,
    REGISTERS,
    SHARED,
    SPARE_BYTES,
    check_early_start,
    own_cache,
)
from tests.kernels.triton.aot import usage
from tests.verify_case import empty_out, inputs

__all__ = ["own_cache"]


def build(is_kda, state, tokens=4, ring_len=8, dims=None, io=BF16, arch=90, params=None):
    kind, usual = HEADS[is_kda]
    lay = layer(kind, dims or usual, ring_len, io=io, state_dtype=state)
    pools, rows = Pool(lay, 2).tensors, torch.zeros(3).int()
    window, out = inputs(lay, 3, tokens), empty_out(lay, 3, tokens)
    weights = case.constants(lay, "cpu")
    with compiled(backend, arch) as kernels:
        backend.replay_verify(
            *window, *weights, *pools, out, rows, rows, rows, rows, *case.gate(lay), params=params
        )  # fmt: skip
    kernel = kernels[0]  # keys of several value heads have a launch of their own
    return kernel, usage(kernel, GPUTarget("cuda", arch, 32))


@pytest.mark.parametrize("is_kda", HEADS)
@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "ring_len"), [(4, 16), (5, 8), (5, 16)])
def test_rows(is_kda, state, tokens, ring_len):
    row = launch.verify(is_kda, state.itemsize, tokens, ring_len)
    kernel, used = build(is_kda, state, tokens, ring_len)
    assert used.spilled <= (SPARE_BYTES if row.maxnreg else 0), str(used)
    resident = min(REGISTERS // (used.registers * 32 * row.warps), SHARED // (used.shared + 1024))
    assert resident >= row.per_sm, str(used)
    check_early_start(kernel)
    text = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in text
    pieces = "bf16.bf16" if state == BF16 else "tf32.tf32"
    assert f"mma.sync.aligned.m16n8k{16 if state == BF16 else 8}.row.col.f32.{pieces}.f32" in text
    assert ".f16.f16" not in text


@pytest.mark.parametrize(
    ("is_kda", "options"),
    [
        (False, dict(state=FP16, tokens=1, ring_len=1, dims=(1, 1, 64, 64), io=FP32)),
        (True, dict(state=FP16, tokens=8, ring_len=32, io=FP16)),
        (False, dict(state=FP32, tokens=6, ring_len=16, dims=(2, 6, 128, 64), arch=100)),
        (False, dict(state=FP32, params=launch.Window(64, 2, 4, tensor=False))),
    ],
)
def test_other_windows(is_kda, options):
    _, used = build(is_kda, **options)
    assert used.shared < SHARED
    assert used.spilled <= SPARE_BYTES, str(used)
