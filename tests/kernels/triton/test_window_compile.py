"""The kernels of windows compile ahead of time for each kind of GPU, as they are really launched, and hardly spill."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from replayssm.spec import LayerSpec

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set, so nothing is compiled", allow_module_level=True)

from replayssm.kernels.triton import backend, commit, window
from tests.kernels.triton import aot
from tests.kernels.triton.test_compile import BF16, F16, F32, HEADS, ONE_OF_EACH, SPARE_BYTES, own_cache

__all__ = ["own_cache"]


def window_launches(kind="gdn", state=F32, rows=64, tokens=4, dims=(128, 128), heads=None, ring_len=8, io=BF16, **gate):
    """Verify on a ring (two launches), with snapshots, and the second run of two layers."""
    h, hv = heads or HEADS[kind]
    spec = LayerSpec(kind, h, hv, *dims, **gate)
    pool = torch.empty(spec.state_array(1).shape, dtype=state)
    ring = [
        torch.empty(x.shape, dtype=io if i == 1 else F32) for i, x in enumerate(spec.ring_arrays(ring_len, 1))
    ]  # fmt: skip
    head = (hv, dims[0]) if spec.is_kda else (hv,)
    index = torch.empty(rows, dtype=torch.int32)
    inputs = [torch.empty(rows, tokens, *shape, dtype=io) for shape in ((spec.qkv_dim,), head, (hv,))]
    weights = [torch.empty(hv), torch.empty(head)]
    out = torch.empty(rows, tokens, hv, dims[1], dtype=io)
    flags = (True, spec.is_kda, spec.lower_bound, spec.beta_scale)
    snapshots = torch.empty(rows, tokens, *pool.shape[1:], dtype=state, device="meta")
    with aot.recorded(window) as launches:
        backend.replay_verify(*inputs, *weights, 0.5, pool, *ring, out, index, index, index, index, *flags)
        backend.packed_verify(*inputs, *weights, 0.5, pool, snapshots, out, index, index, *flags)
        two = [torch.stack([x, x]) for x in (*inputs, *weights, pool)]
        backend.commit_kv_replay(*two, index, index, *flags)
    return launches


@pytest.mark.parametrize(
    ("kind", "state", "target"), [("gdn", F32, "sm_90"), ("gdn", BF16, "gfx942"), ("kda", F32, "sm_90")]
)
def test_windows(kind, state, target):
    launches = window_launches(kind, state)
    assert len(launches) == 4
    for one in launches:
        kernel = aot.compiled(one, aot.TARGETS[target])
        used = aot.usage(kernel, aot.TARGETS[target])
        assert used.spilled <= SPARE_BYTES, f"{one.fn.__name__}: {used}"
        assert "tt.dot" not in kernel.asm["ttir"], "a tensor-core product would round its operands"


@ONE_OF_EACH
@pytest.mark.parametrize(
    "options",
    [
        {"ring_len": 64, "tokens": 64},
        {"dims": (96, 80), "heads": (3, 9), "io": F16, "state": F16},
        {"dims": (1, 1), "heads": (1, 1), "io": F32, "ring_len": 1, "tokens": 1, "rows": 1},
        {"kind": "kda", "dims": (256, 256), "lower_bound": -5.0, "heads": (5, 5)},
    ],
)
def test_other_shapes_and_dtypes_compile(options, target):
    for one in window_launches(**options):
        assert aot.usage(aot.compiled(one, aot.TARGETS[target]), aot.TARGETS[target]).spilled <= SPARE_BYTES


@ONE_OF_EACH
def test_commits_compile(target):
    index, cursors = torch.empty(300, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    with aot.recorded(commit) as launches:
        for force in (None, index):
            backend.commit_cursors(cursors, index, 8, index, index, force)
        for dtype in (F32, BF16):
            state = torch.empty(2, 3, 2, 80, 24, dtype=dtype)
            snapshots = torch.empty(2, 300, 4, 2, 80, 24, dtype=dtype, device="meta")
            backend.commit_snapshot(state, snapshots, index, index)
            backend.commit_snapshot(state[0], snapshots[0], index, index)
        for width, size, dtype in ((4, 3, BF16), (4, 6, F32), (1, 0, F16), (1, 1, F16)):
            x, conv = torch.empty(2, 3, 4, 300, dtype=dtype), torch.empty(2, 5, 300, size, dtype=dtype)
            for windows in (conv, conv.mT.contiguous().mT):
                weight = torch.empty(300, width)
                backend.causal_conv_verify(x[0], windows[0], weight, None, index[:3], index[:3], "silu", x[0])
                backend.commit_conv(windows, x, index[:3], index[:3])
    assert len(launches) == 2 + 4 + 8 + 6
    for one in launches:
        assert aot.usage(aot.compiled(one, aot.TARGETS[target]), aot.TARGETS[target]).spilled == 0
