# mypy: ignore-errors
"""Which thread holds which element. Built at compile time from sizes; the reasons stand with each layout.

The state tile [BV, K] decides: 8 lanes of 16 bytes along K read whole 128-byte lines, and a sum over K takes three
shuffles. Each lane holds up to four consecutive rows, so that every vector over V (v, d, the output) moves in
16-byte pieces and the ring's d tile [BV, L] can have the same rows in the same lanes: its sums need no exchange.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Newer Triton has both under other names, and keeps the first old one as a stub that raises.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def state_layout(rows, k_dim, elem_bytes, warps, most_lanes=8):
    """[BV, K] tile of the checkpoint. most_lanes: along K; 32 let a warp touch whole rows."""
    vec = 16 // elem_bytes
    lanes_k = min(most_lanes, k_dim // vec)
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
def channel_layout(records, k_dim):
    """[L, K] tile of one warp with all records of a channel in one thread, where K allows: sums over later records."""
    lanes = min(32, k_dim // 4)
    return gl.BlockedLayout([records * lanes // 32, 4], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.constexpr_function
def ring_copy_layout(rows, warps):
    """[L, BV] tile of d on its way to shared memory: 16 bytes a lane, whole rows."""
    lanes = min(32, rows // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def flat_layout(warps):
    """A vector of fp32 on its way to shared memory."""
    return gl.BlockedLayout([4], [32], [warps], [0])


@gluon.constexpr_function
def tile_layout(rows, k_dim, dtype):
    """Shared memory [CH, K] that the bulk copy engine fills."""
    return gl.NVMMASharedLayout.get_default_for([rows, k_dim], dtype)


@gluon.constexpr_function
def barrier_layout():
    """Shared memory of barriers."""
    return mbarrier.MBarrierLayout()


@gluon.constexpr_function
def flat():
    """Shared memory of a vector."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def columns():
    """Shared memory [BV, 1]."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0, 1])


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


@gluon.jit
def as_columns(tile, N: gl.constexpr, ROWS: gl.constexpr):
    """A shared tile [N, ROWS] of fp32 as [N, ROWS, 1], so that one record can be indexed as a column."""
    if _REINTERPRET_IS_PUBLIC:
        return tile.reinterpret(gl.float32, [N, ROWS, 1], columns())
    else:
        return tile._reinterpret(gl.float32, [N, ROWS, 1], columns())


@gluon.jit
def as_vectors(tile, N: gl.constexpr, K: gl.constexpr):
    """A shared tile [N, K] of fp32 as N vectors."""
    if _REINTERPRET_IS_PUBLIC:
        return tile.reinterpret(gl.float32, [N, K], flat())
    else:
        return tile._reinterpret(gl.float32, [N, K], flat())


@gluon.jit
def one_by_one(vectors, N: gl.constexpr):
    """Shared vectors of fp32 as [N, 1], so that every lane can take one number."""
    if _REINTERPRET_IS_PUBLIC:
        return vectors.reinterpret(gl.float32, [N, 1], flat())
    else:
        return vectors._reinterpret(gl.float32, [N, 1], flat())
