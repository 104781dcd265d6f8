"""Launch parameters: tile sizes and warps from a small table. Nothing is tuned at run time.

Decode works in place, so trying configurations on live pools would corrupt them, and a first call must equal the
second. The rows below are estimates from register counts; measure them per GPU kind before trusting them for speed.
They never change a result beyond the order of fp32 sums.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.spec import Kind


class Row(NamedTuple):
    """What one program holds: `rows` of the state (for K = 128; other K keep the number of elements) and `records` of
    the ring at a time, over `warps`, loaded `vec` elements at once."""

    rows: int
    records: int
    warps: int
    vec: int = 4


# (kind, bytes of a state element) -> [(batch rows x value heads up to, Row)]. To be measured per GPU kind.
# Few programs want small tiles (more of them run at once); many want large tiles, whose programs share the work on
# the ring between more state rows. KDA's work on the ring is too large to repeat it for 16 rows.
_MANY = 1 << 62
# Sixteen records fill the lanes and warps of a tile of four warps. One vector width for state, k and g gives their
# tiles one layout; 8 would suit a 16-bit state, but takes KDA from 168 to 228 registers a thread (sm_90).
DECODE: dict[tuple[Kind, int], list[tuple[int, Row]]] = {
    ("gdn", 4): [(512, Row(16, 16, 4)), (_MANY, Row(32, 16, 4))],
    ("gdn", 2): [(512, Row(32, 16, 4)), (_MANY, Row(64, 16, 4))],
    ("kda", 4): [(_MANY, Row(32, 16, 4))],
    ("kda", 2): [(_MANY, Row(32, 16, 4))],
}
FOLD = Row(32, 1, 4)
UNROLL = 2  # records of a fold whose loads overlap
WINDOW_UNROLL = 2  # tokens of a window whose loads overlap
CONV_TILE, CONV_COLUMNS = (256, 4), (512, 4)  # channels of a program and its warps, by the layout of the windows
CURSOR_ROWS = 256
COPY = (2048, 4)  # elements of a program that copies, and its warps

# No autotuning, no software pipelining, and fused multiply-adds whatever the version's default.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True}

_LANES = 8  # lanes along K: few, since each doubling costs a shuffle for every state row and readout


class Tile(NamedTuple):
    """A launch: the [BK/BC, BV, BC] state tile of a program, BJ records at a time.

    BV state rows; BK = K rounded up to a power of two; BC contiguous columns, shared by the lanes of one row, VEC of
    them a vector load.
    """

    BV: int
    BK: int
    BC: int
    VEC: int
    BJ: int
    warps: int
    tiles: int  # programs that share the V rows of a head
    even: bool  # no mask needed


@lru_cache(maxsize=1024)
def decode_tile(kind: Kind, itemsize: int, heads: int, v_dim: int, k_dim: int, ring_len: int) -> Tile:
    """Tile of a decode over `heads` = rows of the batch x value heads."""
    row = next(row for limit, row in DECODE[kind, itemsize] if heads <= limit)
    return _tile(row, v_dim, k_dim, ring_len)


@lru_cache(maxsize=1024)
def fold_tile(v_dim: int, k_dim: int) -> Tile:
    """Tile of `flush` and `materialize`."""
    return _tile(FOLD, v_dim, k_dim, 1)


def _tile(row: Row, v_dim: int, k_dim: int, ring_len: int) -> Tile:
    bk, v2 = power_of_2(k_dim), power_of_2(v_dim)
    bv = max(1, min(v2, row.rows * 128 // max(bk, 32)))
    bc = min(bk, _LANES * row.vec)
    warps = row.warps
    while warps > 1 and bv * bk < warps * 32 * row.vec:
        warps //= 2
    tiles = -(-v_dim // bv)
    return Tile(
        bv,
        bk,
        bc,
        min(row.vec, bc),
        min(row.records, power_of_2(ring_len)),
        warps,
        tiles,
        bk == k_dim and tiles * bv == v_dim,
    )


def power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current: Triton launches on the current one. A no-op on the CPU (interpreter)."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()
