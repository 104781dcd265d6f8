"""Bytes of one decode step against the ring length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MIB = 2**20


def plot(result: dict[str, Any], title: str, path: Path) -> None:
    """Write a figure of what `replayssm.planner.report` returns: one row, all linear layers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ring, simple = result["ring"], result["step"][0]
    total = [n / MIB for n in ring["bytes_by_length"]]
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(ring["packed_bytes"] / MIB, color="C3", label="packed: the state read and written")
    axes.plot(range(1, len(total) + 1), total, color="C0", label="replay: state, ring and folds")
    state_only = simple["simplest"]["replay"] / simple["batch"] / MIB
    axes.axhline(state_only, color="0.5", linestyle=":", label="replay, state read only (V, K and L without bound)")
    for name, marker in (("best", "o"), ("chosen", "D")):
        length = ring[name]
        axes.plot([length], [total[length - 1]], f"C0{marker}", label=f"{name}: L = {length}")
    axes.set_xlim(1, len(total))
    axes.set_ylim(0, 1.08 * max(*total, ring["packed_bytes"] / MIB))
    axes.set_xlabel("ring length L")
    axes.set_ylabel("MiB per step and request, all linear layers")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=150)
