"""Statistics of serving runs. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from replayssm.bench.roofline import percentile

SHORT = ("mean", "median", "p99")
LONG = ("mean", "median", "p90", "p99")


def summary(seconds: Sequence[float], names: Sequence[str] = SHORT) -> dict[str, float] | None:
    """Milliseconds by name: "mean", "median" or a percentile as in "p99". None without values."""
    if not seconds:
        return None
    found = {}
    for name in names:
        if name == "mean":
            value = sum(seconds) / len(seconds)
        else:
            value = percentile(seconds, 50 if name == "median" else float(name[1:]))
        found[name] = 1e3 * value
    return found


def gaps(times: Sequence[float]) -> list[float]:
    """Seconds between neighbours."""
    return [after - before for before, after in pairwise(times)]


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Length that the spans (start, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def add_ratios(rows: list[dict[str, Any]], load: str, rate: str) -> None:
    """Set `vs_packed`: `rate` of a row over that of packed decode at the same `load` and state dtype, None without."""
    packed = {(row[load], row["state_dtype"]): row[rate] for row in rows if row["mode"] == "packed"}
    for row in rows:
        base = packed.get((row[load], row["state_dtype"]))
        row["vs_packed"] = row[rate] / base if row[rate] and base else None
