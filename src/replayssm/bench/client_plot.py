"""Rate of tokens and latencies of a server against the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replayssm.bench.plot import MARKERS

TIMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Two panels: output tokens a second; medians in milliseconds, up to p99."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ticks = ["all at once" if row["load"] is None else f"{row['load']:g}" for row in rows]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    rate, times = figure.subplots(1, 2)
    rate.plot(range(len(rows)), [row["output_tokens_per_s"] for row in rows], marker="o", linewidth=1.8)
    rate.set_ylabel("output tokens/s")
    rate.set_ylim(bottom=0)
    for i, (key, name) in enumerate(TIMES.items()):
        at = [j for j, row in enumerate(rows) if row[key]]
        middle = [rows[j][key]["median"] for j in at]
        up = [max(0.0, rows[j][key]["p99"] - rows[j][key]["median"]) for j in at]
        times.errorbar(
            at, middle, yerr=[[0.0] * len(up), up], marker=MARKERS[i], color=f"C{i}", capsize=3, label=name
        )  # fmt: skip
    times.set_yscale("log")
    times.set_ylabel("ms (median, up to p99)")
    times.legend()
    for axes in (rate, times):
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel({"rate": "requests per second"}.get(rows[0]["kind"], "requests at once"))
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
