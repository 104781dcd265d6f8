"""From bytes and microseconds to GB/s, fractions of a ceiling and ratios. Needs no torch.

The bytes are those the algorithm must move (states and valid records of live rows), not what a kernel happens to.
Packed decode is held against the in-place read+write ceiling, replay against the pure-read ceiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replayssm.spec import LayerSpec, packed_traffic, replay_traffic

CEILING_OF = {"packed": "read_write", "replay": "read"}


def step_bytes(spec: LayerSpec, route: str, batch: int, ring_len: int, state_dtype: str, io_dtype: str) -> float:
    """Bytes of one step of one layer, all rows; replay averaged over a ring period."""
    if route == "packed":
        return batch * packed_traffic(spec, state_dtype).total
    return batch * replay_traffic(spec, ring_len, state_dtype, io_dtype).total


def gb_per_s(nbytes: float, us: float) -> float:
    """10⁹ bytes per second."""
    return nbytes / us / 1e3


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 … 100), interpolated between neighbours."""
    ordered = sorted(values)
    at = p / 100 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Set `vs_packed` and `vs_best_peer`: how many times faster a row is than those of its batch and state dtype.

    `auto_vs_packed` is that of the route in `auto_route`: packed decode against itself is 1. None without a time on
    either side, or without a route.
    """
    for row in rows:
        same = [r for r in rows if r["us"] and all(r[k] == row[k] for k in ("batch", "state_dtype"))]
        packed = [r["us"] for r in same if r["route"] == "packed" and not r["peer"]]
        peers = [r["us"] for r in same if r["peer"]]
        row["vs_packed"] = packed[0] / row["us"] if packed and row["us"] else None
        row["vs_best_peer"] = min(peers) / row["us"] if peers and row["us"] else None
        by_route = {"replay": row["vs_packed"], "packed": 1.0 if packed else None}
        row["auto_vs_packed"] = by_route.get(row["auto_route"])
