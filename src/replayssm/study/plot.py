"""Figures of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replayssm.spec import DEFAULT_RING_LEN, STATE_DTYPES
from replayssm.study.setting import ROUNDED

LINES = {"packed": "--", "replay": "-"}


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """drift.png: error against steps. ring.png: against ring length. rounding.png: of tensor-core operands."""
    made = []
    rows = result["drift"]
    for name, draw in (("drift", _drift), ("ring", _ring), ("rounding", _rounding)):
        figure, panels = _panels(rows)
        for case, axes in panels.items():
            draw([r for r in rows if (r["kind"], r["decay"]) == case], axes)
        first, *others = panels.values()
        first.legend(fontsize="x-small")
        for axes in others:
            axes.set_ylabel("")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        made.append(path)
    return made


def _panels(rows: list[dict[str, Any]]) -> tuple[Any, dict[tuple[str, str], Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((r["kind"], r["decay"]) for r in rows))
    figure = Figure(figsize=(3.4 * len(cases), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for (kind, decay), axes in zip(cases, grid, strict=True):
        axes.set_title(f"{kind.upper()}, {decay} decay", fontsize="medium")
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    return figure, dict(zip(cases, grid, strict=True))


def _drift(rows: list[dict[str, Any]], axes: Any) -> None:
    for at, dtype in enumerate(STATE_DTYPES):
        for route, length, operands in (("packed", None, None), ("replay", DEFAULT_RING_LEN, "exact")):
            wanted = (dtype, length, operands)
            mine = [r for r in rows if (r["state_dtype"], r["ring_len"], r["operands"]) == wanted]
            name = f"{route}, {dtype}"
            axes.plot(*_xy(mine, "steps"), LINES[route], marker=".", color=f"C{at}", label=name)
    axes.set_xlabel("steps")
    axes.set_ylabel("relative state error")


def _ring(rows: list[dict[str, Any]], axes: Any) -> None:
    end = max(r["steps"] for r in rows)
    for at, dtype in enumerate(STATE_DTYPES):
        mine = [r for r in rows if r["state_dtype"] == dtype and r["steps"] == end]
        axes.plot(*_xy([r for r in mine if r["operands"] == "exact"], "ring_len"), marker=".", color=f"C{at}",
                  label=f"replay, {dtype}")  # fmt: skip
        for row in (r for r in mine if r["route"] == "packed"):
            axes.axhline(row["state_error"], linestyle="--", color=f"C{at}", label=f"packed, {dtype}")
    axes.set_xlabel("ring length L")
    axes.set_ylabel(f"relative state error, step {end}")


def _rounding(rows: list[dict[str, Any]], axes: Any) -> None:
    for at, operands in enumerate(("exact", *ROUNDED)):
        wanted = ("float32", operands, DEFAULT_RING_LEN)
        mine = [r for r in rows if (r["state_dtype"], r["operands"], r["ring_len"]) == wanted]
        axes.plot(*_xy(mine, "steps", "output_error"), marker=".", color=f"C{at}", label=f"{operands} operands")
    axes.set_xlabel("steps")
    axes.set_ylabel("relative output error")


def _xy(rows: list[dict[str, Any]], x: str, y: str = "state_error") -> tuple[list[Any], list[Any]]:
    return [r[x] for r in rows], [r[y] for r in rows]
