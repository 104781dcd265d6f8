"""Time per step and fraction of the ceiling, against the batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MARKERS = "osD^vP*X"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write a figure of two panels; rows without a time are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    timed = [row for row in rows if row["us"]]
    lines = list(dict.fromkeys((row["kernel"], row["state_dtype"]) for row in timed))
    dtypes = list(dict.fromkeys(dtype for _, dtype in lines))
    kernels = list(dict.fromkeys(kernel for kernel, _ in lines))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    time, roof = figure.subplots(1, 2)
    for kernel, dtype in lines:
        mine = sorted(
            (r for r in timed if (r["kernel"], r["state_dtype"]) == (kernel, dtype)), key=lambda r: r["batch"]
        )
        batches, us = [r["batch"] for r in mine], [r["us"] for r in mine]
        at = kernels.index(kernel)
        style: dict[str, Any] = dict(color=f"C{at % 10}", marker=MARKERS[at % len(MARKERS)], linewidth=1.8)
        style |= dict(linestyle=("-", "--", ":")[dtypes.index(dtype) % 3], label=f"{kernel}, state {dtype}")
        spread = [[r["us"] - r["us_p10"] for r in mine], [r["us_p90"] - r["us"] for r in mine]]
        time.plot(batches, us, **style)
        time.errorbar(batches, us, yerr=spread, fmt="none", capsize=3, ecolor=style["color"])
        roof.plot(batches, [r["of_ceiling"] for r in mine], **style)
    time.set_yscale("log")
    for which in (time.yaxis.set_major_formatter, time.yaxis.set_minor_formatter):
        which(StrMethodFormatter("{x:g}"))
    time.set_ylabel("µs per step, one layer (median, p10 to p90)")
    roof.axhline(1, color="0.4", linewidth=1)
    roof.set_ylim(0, max([1.1, *(1.05 * r["of_ceiling"] for r in timed)]))
    roof.set_ylabel("fraction of the ceiling\n(packed: read+write, replay: read)")
    ticks = sorted({row["batch"] for row in timed})
    for axes in (time, roof):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(tick) for tick in ticks])
        axes.set_xlabel("batch")
        axes.grid(alpha=0.3)
    if lines:
        time.legend(fontsize="small", handlelength=4)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
