"""Launch parameters, one row per case. The numbers of a row come from timing on an H200, not from a formula.

A row is chosen by kind, bytes of a state element and batch size, then fitted to the geometry of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FOLD_LATER, FOLD_FMA, FOLD_MMA = 0, 1, 2


@dataclass(frozen=True)
class Launch:
    """How one step is launched.

    rows: rows of V that a program serves (BV); chunk: rows handled at once (CH); warps: per program; staged: state
    by way of shared memory; fold: see `fused`; two_launches: `split` instead of `fused`; pdl: start the readout
    while the prologue drains; evict: L2 policy of state reads; maxnreg: register cap; prologue_warps: for `split`.
    """

    rows: int
    chunk: int
    warps: int
    staged: bool = True
    fold: int = FOLD_FMA
    two_launches: bool = False
    pdl: bool = False
    evict: str = ""
    maxnreg: int | None = None
    prologue_warps: int = 2
    scan: bool = True

    def fit(self, v_dim: int, k_dim: int, elem_bytes: int, ring_len: int = 16) -> Launch:
        """The same row for another geometry: no more rows than V, warps that have rows, a tile that fits.

        A register cap was measured for K <= 128 and L <= 16; beyond, it would spill.
        """
        rows, warps = min(self.rows, v_dim), self.warps
        while self.staged and rows > 16 and rows * k_dim * elem_bytes > 96 * 1024:
            rows //= 2
        lanes_v = 32 // min(8, k_dim * elem_bytes // 16)
        chunk = min(self.chunk, rows)
        if not self.staged and chunk * k_dim > 128 * 32 * warps:
            chunk = max(lanes_v * warps, 128 * 32 * warps // k_dim)
        while warps > 1 and chunk < lanes_v * warps:
            warps //= 2
        fold = self.fold if self.fold != FOLD_MMA or chunk >= 16 * warps else FOLD_FMA
        maxnreg = self.maxnreg if k_dim <= 128 and ring_len <= 16 else None
        return replace(self, rows=rows, chunk=chunk, warps=warps, fold=fold, maxnreg=maxnreg)


# (kind, bytes of a state element) -> ((largest batch, row), ...), the last batch being None: no limit.
Table = dict[tuple[str, int], tuple[tuple[int | None, Launch], ...]]

# Timed with K = V = 128, L = 16 at B = 1, 8, 64 and 256; the limits between are halfway guesses.
_DIRECT = Launch(64, 64, 4, staged=False)
REPLAY: Table = {
    ("gdn", 4): ((None, _DIRECT),),
    ("gdn", 2): ((2, _DIRECT), (128, Launch(128, 128, 8, staged=False)), (None, Launch(128, 32, 4))),
    ("kda", 4): ((32, _DIRECT), (None, Launch(128, 32, 4))),
    ("kda", 2): ((2, _DIRECT), (None, Launch(128, 32, 4))),
}
PACKED: Table = {
    ("gdn", 4): (
        (2, Launch(16, 16, 1, staged=False)),
        (32, Launch(32, 32, 2, staged=False)),
        (None, Launch(64, 16, 4)),
    ),
    ("gdn", 2): ((32, _DIRECT), (None, Launch(128, 32, 4))),
    ("kda", 4): ((2, _DIRECT), (32, Launch(16, 16, 1, staged=False)), (None, Launch(64, 16, 4))),
    ("kda", 2): ((2, _DIRECT), (None, Launch(64, 16, 4))),
}
FOLD_ROWS, FOLD_WARPS = 64, 4


def choose(table: Table, kind: str, elem_bytes: int, batch: int, v_dim: int, k_dim: int, ring_len: int = 16) -> Launch:
    """The row for a batch, fitted to V and K."""
    for limit, row in table[kind, elem_bytes]:
        if limit is None or batch <= limit:
            return row.fit(v_dim, k_dim, elem_bytes, ring_len)
    raise LookupError(f"launch table has no open-ended row for {kind}, {elem_bytes} bytes")
