"""A kernel that only reads: what bounds replay decode."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _read(x_ptr, sink_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at), 0)
    if total == 12345.678:  # never, but the compiler does not know
        tl.store(sink_ptr, total)


def read(x: Tensor, sink: Tensor) -> None:
    """Read all of x; its size must be a multiple of `BLOCK`."""
    _read[(x.numel() // BLOCK,)](x, sink, BLOCK=BLOCK, num_warps=8)
