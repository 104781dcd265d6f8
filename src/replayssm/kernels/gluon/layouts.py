# mypy: ignore-errors
"""Which thread holds which element. Built at compile time from sizes; the reasons stand with each layout.

The state tile [BV, K] decides: 8 lanes of 16 bytes along K read whole 128-byte lines, and a sum over K takes three
shuffles. Each lane holds up to four consecutive rows, so that every vector over V (v, d, the output) moves in
16-byte pieces and the ring's d tile [BV, L] can have the same rows in the same lanes: its sums need no exchange.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Newer Triton has both under other names, and keeps the first old one as a stub that raises.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def state_layout(rows, k_dim, elem_bytes, warps):
    """[BV, K] tile of the checkpoint."""
    vec = 16 // elem_bytes
    lanes_k = min(8, k_dim // vec)
    lanes_v = 32 // lanes_k
    per_lane = max(1, min(4, rows // (lanes_v * warps)))
    return gl.BlockedLayout([per_lane, vec], [lanes_v, lanes_k], [warps, 1], [1, 0])


@gluon.constexpr_function
def ring_d_layout(rows, k_dim, elem_bytes, warps):
    """[BV, L] tile of d: rows as in `state_layout`, records across the lanes that share a row."""
    vec = 16 // elem_bytes
    lanes_k = min(8, k_dim // vec)
    lanes_v = 32 // lanes_k
    per_lane = max(1, min(4, rows // (lanes_v * warps)))
    return gl.BlockedLayout([per_lane, 1], [lanes_v, lanes_k], [warps, 1], [1, 0])


@gluon.constexpr_function
def ring_k_layout(records, k_dim, warps):
    """[L, K] tile of k (and g): 4 lanes along L, 8 along K, warps along K.

    A lane holds consecutive records, so a scan over L is mostly within a thread; nothing is repeated by two warps.
    """
    vec = max(1, min(4, k_dim // (8 * warps)))
    return gl.BlockedLayout([records // 4, vec], [4, 8], [1, warps], [1, 0])


@gluon.constexpr_function
def mma_layout(warps):
    """Accumulator of the tf32 fold; each warp has 16 rows of V."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def row_major():
    """Shared memory [L, K] without swizzle: it is written once and read row by row."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.jit
def as_rows(tile, N: gl.constexpr, K: gl.constexpr):
    """A shared tile [N, K] of fp32 as [N, 1, K], so that one row can be indexed."""
    if _REINTERPRET_IS_PUBLIC:
        return tile.reinterpret(gl.float32, [N, 1, K], row_major())
    else:
        return tile._reinterpret(gl.float32, [N, 1, K], row_major())
