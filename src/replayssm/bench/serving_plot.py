"""Throughput against the batch size, latency against the rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from replayssm.bench.plot import MARKERS

Row = dict[str, Any]


def throughput(rows: list[Row], title: str, path: Path) -> None:
    """Decode tokens a second, and TPOT with its p99, against the batch size."""
    batches = sorted({row["batch"] for row in rows})
    _figure(
        rows, title, path, "batch", [str(batch) for batch in batches], lambda row: batches.index(row["batch"]),
        ("decode tokens/s", lambda row: row["decode_tokens_per_s"], None),
        ("TPOT, ms (mean, up to p99)", lambda row: row["tpot_ms"]["mean"], lambda row: row["tpot_ms"]["p99"]),
    )  # fmt: skip


def latency(rows: list[Row], title: str, path: Path) -> None:
    """Median TTFT and TPOT with their p99, against the rate of arrivals."""
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: float("inf") if rate is None else rate)
    _figure(
        rows, title, path, "requests per second", ["all at once" if rate is None else f"{rate:g}" for rate in rates],
        lambda row: rates.index(row["rate"]),
        ("TTFT, ms (median, up to p99)", lambda row: row["ttft_ms"]["median"], lambda row: row["ttft_ms"]["p99"]),
        ("TPOT, ms (median, up to p99)", lambda row: row["tpot_ms"]["median"], lambda row: row["tpot_ms"]["p99"]),
    )  # fmt: skip


Panel = tuple[str, Callable[[Row], float], Callable[[Row], float] | None]


def _figure(
    rows: list[Row], title: str, path: Path, label: str, ticks: list[str], at: Callable[[Row], int], *panels: Panel
) -> None:
    """One line for each mode and state dtype; rows without a time are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["status"] == "ok" and row["tpot_ms"]]
    lines = list(dict.fromkeys((row["mode"], row["state_dtype"]) for row in timed))
    modes = list(dict.fromkeys(mode for mode, _ in lines))
    dtypes = list(dict.fromkeys(dtype for _, dtype in lines))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(1, len(panels))
    for axes, (name, value, high) in zip(every, panels, strict=True):
        for mode, dtype in lines:
            mine = sorted((r for r in timed if (r["mode"], r["state_dtype"]) == (mode, dtype)), key=at)
            which = modes.index(mode)
            style: dict[str, Any] = dict(color=f"C{which % 10}", marker=MARKERS[which % len(MARKERS)], linewidth=1.8)
            style |= dict(linestyle=("-", "--", ":")[dtypes.index(dtype) % 3], label=f"{mode}, state {dtype}")
            x, y = [at(row) for row in mine], [value(row) for row in mine]
            axes.plot(x, y, **style)
            if high is not None:
                up = [max(0.0, high(row) - value(row)) for row in mine]
                axes.errorbar(x, y, yerr=[[0.0] * len(up), up], fmt="none", capsize=3, ecolor=style["color"])
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel(label)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if lines:
        every[0].legend(fontsize="small", handlelength=4)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
