"""Launch parameters, one row per case. The numbers of a row come from timing on an H200, not from a formula.

A row is chosen by kind, bytes of a state element and value heads in the batch, then fitted to the geometry of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


def padded(size: int, least: int = 1) -> int:
    """The size that a kernel's tiles have."""
    return max(least, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Launch:
    """`fused` or `packed`: a program for every tile.

    rows: rows of V that a program serves (BV); chunk: rows handled at once (CH); warps: per program; maxnreg: register
    cap. `packed` only: whole: a warp reads and writes whole rows; staged: state by way of shared memory.
    """

    rows: int
    chunk: int
    warps: int
    staged: bool = False
    whole: bool = False
    maxnreg: int | None = None

    def fit(self, v_dim: int, k_dim: int, elem_bytes: int, ring_len: int) -> Launch:
        """The same row for another geometry: rows that divide V, warps that have rows, a tile that fits.

        A register cap was measured for K <= 128 and L <= 16; beyond, it would spill.
        """
        rows, warps, k_dim = min(self.rows, v_dim & -v_dim), self.warps, padded(k_dim)
        while self.staged and rows > 16 and rows * k_dim * elem_bytes > 96 * 1024:
            rows //= 2
        lanes_v = 32 // min(32 if self.whole else 8, k_dim * elem_bytes // 16)
        chunk = min(self.chunk, rows)
        if not self.staged and chunk * k_dim > 128 * 32 * warps:
            chunk = max(lanes_v * warps, 128 * 32 * warps // k_dim)
        while warps > 1 and chunk < lanes_v * warps:
            warps //= 2
        maxnreg = self.maxnreg if k_dim <= 128 and ring_len <= 16 else None
        return replace(self, rows=rows, chunk=chunk, warps=warps, maxnreg=maxnreg)

    @property
    def constants(self) -> dict[str, Any]:
        """Of the kernel."""
        return dict(BV=self.rows, CH=self.chunk, NW=self.warps)

    @property
    def options(self) -> dict[str, Any]:
        """Of Triton."""
        return _EARLY | dict(num_warps=self.warps) | ({} if self.maxnreg is None else dict(maxnreg=self.maxnreg))


@dataclass(frozen=True)
class Stream:
    """`stream`: per_sm programs a multiprocessor, that take tiles in turn.

    rows: rows of V of a tile (BV); chunk: rows handled at once (CH); warps: that consume; stages: tiles in shared
    memory; worker_regs: registers of the other warps; workers: warps that prepare, not more than stages, or one could
    be two phases ahead; maxnreg: average over all warps.
    """

    rows: int
    chunk: int
    warps: int
    stages: int
    per_sm: int
    worker_regs: int = 104
    workers: int = 2
    maxnreg: int = 128

    def __post_init__(self) -> None:
        assert self.warps % 4 == 0, "Triton specializes warps in groups of four"
        assert self.workers in (1, 2)
        assert self.workers <= self.stages

    @property
    def constants(self) -> dict[str, Any]:
        """Of the kernel."""
        return dict(
            BV=self.rows, CH=self.chunk, NW=self.warps, STAGES=self.stages, WORKERS=self.workers, REGS=self.worker_regs
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """Of Triton."""
        return _EARLY | dict(num_warps=self.warps, maxnreg=self.maxnreg)


@dataclass(frozen=True)
class Window:
    """`verify`: a program for every value head of a row.

    chunk: rows of V copied and read at once (CH), 16 for each warp; buffers: such chunks in shared memory; warps: per
    program; per_sm: programs that a multiprocessor should hold; tensor: products with the state on tensor cores, from
    exact pieces; maxnreg: register cap.
    """

    chunk: int
    buffers: int
    warps: int
    per_sm: int = 2
    tensor: bool = True
    maxnreg: int | None = None

    def constants(self, v_dim: int) -> dict[str, Any]:
        """Of the kernel."""
        buffers = min(self.buffers, v_dim // self.chunk)
        return dict(CH=self.chunk, BUFFERS=buffers, NW=self.warps, TENSOR=self.tensor)

    @property
    def options(self) -> dict[str, Any]:
        """Of Triton."""
        return _EARLY | dict(num_warps=self.warps) | ({} if self.maxnreg is None else dict(maxnreg=self.maxnreg))


FUSED: dict[str, Any] = dict(enable_fp_fusion=True)  # multiply-adds, whatever the version's default
# A kernel may be put on the GPU while the one before it drains; it waits for its end before it reads anything.
_EARLY: dict[str, Any] = dict(launch_pdl=True, **FUSED)
APPEND: dict[str, Any] = dict(num_warps=4, **_EARLY)  # keys of windows

# (KDA, bytes of a state element) -> ((largest number of heads in the batch, row), ...); None: no limit.
# Timed with K = V = 128 and 32 value heads at B = 8, 16, 32, 64 and 256, packed also at 1 (some at 2 and 4); limits lie
# at a batch that was timed or between two.
Table = dict[tuple[bool, int], tuple[tuple[int | None, Launch | Stream], ...]]

_DIRECT_4 = Launch(64, 64, 4, maxnreg=168)
_DIRECT_2 = Launch(64, 64, 4, maxnreg=128)
REPLAY: Table = {
    (False, 4): ((1536, _DIRECT_4), (None, Stream(64, 64, 4, 2, 2))),
    (False, 2): ((2048, _DIRECT_2), (None, Stream(128, 64, 4, 2, 2))),
    (True, 4): ((1536, _DIRECT_4), (None, Stream(64, 64, 4, 2, 2, worker_regs=112))),
    (True, 2): ((2048, _DIRECT_2), (None, Stream(128, 64, 4, 2, 2, workers=1))),
}
# A stream prepares rings of up to 8 records in one piece; longer ones keep it waiting, and these are faster.
# KDA goes without a register cap there: its weights would spill.
REPLAY_LONG: Table = {
    (False, 4): ((None, _DIRECT_4),),
    (False, 2): ((None, _DIRECT_2),),
    (True, 4): ((None, Launch(64, 64, 4)),),
    (True, 2): ((None, Launch(64, 64, 4)),),
}
STREAM_DIM, STREAM_RING = 128, 8

_WHOLE_8 = Launch(8, 8, 1, whole=True)
PACKED: Table = {
    (False, 4): (
        (128, Launch(8, 8, 2, whole=True)),
        (4096, _WHOLE_8),
        (None, Launch(16, 16, 1, whole=True)),
    ),
    (False, 2): ((None, _WHOLE_8),),
    (True, 4): (
        (64, Launch(8, 8, 2, whole=True)),
        (1024, Launch(16, 8, 1, whole=True)),
        (None, Launch(16, 16, 2, whole=True)),
    ),
    (True, 2): (
        (128, Launch(32, 32, 4)),
        (1024, Launch(64, 16, 4, staged=True)),
        (None, Launch(16, 8, 1, whole=True, staged=True)),
    ),
}


# Chosen from registers and shared memory, so that four programs fit a multiprocessor; not timed yet.
VERIFY: dict[tuple[bool, int], Window] = {
    (False, 4): Window(64, 1, 4, per_sm=4, maxnreg=128),
    (False, 2): Window(64, 2, 4, per_sm=4, maxnreg=128),
    (True, 4): Window(64, 1, 4, per_sm=4, maxnreg=128),
    (True, 2): Window(64, 2, 4, per_sm=4, maxnreg=128),
}


def _choose(table: Table, is_kda: bool, elem_bytes: int, heads: int) -> Any:
    for limit, row in table[is_kda, elem_bytes]:
        if limit is None or heads <= limit:
            return row
    raise LookupError(f"launch table has no open-ended row for KDA {is_kda}, {elem_bytes} bytes")


def replay(
    is_kda: bool, elem_bytes: int, heads: int, v_dim: int, k_dim: int, ring_len: int, whole_rows: bool = True
) -> Launch | Stream:
    """The row for replay decode. heads: value heads in all rows of the batch; whole_rows: slots are rows of K apart."""
    streams = v_dim == k_dim == STREAM_DIM and ring_len <= STREAM_RING and whole_rows
    row: Launch | Stream = _choose(REPLAY if streams else REPLAY_LONG, is_kda, elem_bytes, heads)
    return row.fit(v_dim, k_dim, elem_bytes, ring_len) if isinstance(row, Launch) else row


def packed(is_kda: bool, elem_bytes: int, heads: int, v_dim: int, k_dim: int) -> Launch:
    """The row for packed decode."""
    row: Launch = _choose(PACKED, is_kda, elem_bytes, heads)
    return row.fit(v_dim, k_dim, elem_bytes, 1)


def verify(is_kda: bool, elem_bytes: int, tokens: int, ring_len: int) -> Window:
    """The row for a window on a ring. Its register cap is for 4 tokens and 16 records: with more it would spill."""
    row = VERIFY[is_kda, elem_bytes]
    return row if tokens <= 4 and ring_len <= 16 else replace(row, per_sm=2, maxnreg=None)


def fold(elem_bytes: int, v_dim: int, k_dim: int, ring_len: int) -> Launch:
    """The row for a flush outside decode."""
    return Launch(64, 64, 4).fit(v_dim, k_dim, elem_bytes, ring_len)
