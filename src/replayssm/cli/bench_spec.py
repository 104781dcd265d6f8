"""`replayssm bench spec`: strategies of verification side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import __version__ as transformers_version

from replayssm.bench import device, speculation
from replayssm.bench.spec_request import SpecRequest
from replayssm.cli.bench_model import load_for
from replayssm.cli.bench_output import write_json, write_plot
from replayssm.cli.console import human_bytes, print_table, step

HEADER = ("batch", "state", "strategy", "tok/s", "× none", "step ms", "tokens/step", "memory", "check")


def run_command(request: SpecRequest) -> int:
    """Return 0, or 1 when a row failed."""
    where = device.resolve(request.args.device)
    facts, software = device.describe(where), device.versions() | {"transformers": transformers_version}
    plan, context, loaded = load_for(request, where)
    found = speculation.run(request, loaded, context, step)
    args = request.args
    title = (
        f"{plan.name}, {plan.layers} of {plan.all_layers} layers, {args.spec_tokens} drafts, {args.acceptance:g} right"
    )
    print(f"{title}, ring of {args.ring_len}, {facts['name']}\n")
    print_table(HEADER, [_cells(row) for row in found.rows], left=3)
    failed = [row for row in found.rows if row["status"] != "ok"]
    for row in failed:
        print(f"FAILED {row['strategy']}, state {row['state_dtype']}, B = {row['batch']}: {row['error']}")
    result: dict[str, Any] = dict(command=request.command, name=plan.name, layers=plan.layers)
    result |= dict(all_layers=plan.all_layers, weights="random weights" if plan.random else "loaded")
    result |= dict(
        dtype=request.dtype, context=context, device=facts, versions=software, ok=not failed, rows=found.rows
    )
    for name in ("ring_len", "spec_tokens", "acceptance", "steps", "prompt_tokens", "chunk_tokens", "seed"):
        result[name] = getattr(args, name)
    write_json(result, args)
    write_plot(request.plot_file, lambda file: plot(found.rows, title, file))
    return 1 if failed else 0


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Tokens a second over those of plain decode, against the batch size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    batches = sorted({row["batch"] for row in rows})
    for name, dtype in dict.fromkeys((row["strategy"], row["state_dtype"]) for row in rows):
        mine = [r for r in rows if (r["strategy"], r["state_dtype"]) == (name, dtype) and r["vs_none"]]
        axes.plot(
            [batches.index(r["batch"]) for r in mine], [r["vs_none"] for r in mine], "o-", label=f"{name}, {dtype}"
        )
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.set_ylabel("tokens/s over those without drafts")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (str(row["batch"]), row["state_dtype"], row["strategy"])
    if row["status"] != "ok":
        return (*head, "FAILED", *("–",) * 4, "see below")
    return (
        *head,
        f"{row['tokens_per_s']:.0f}",
        "–" if row["vs_none"] is None else f"{row['vs_none']:.2f}",
        f"{row['step_ms']:.2f}",
        f"{row['tokens_per_step']:.2f}",
        human_bytes(row["memory_bytes"]),
        row["check"]["status"],
    )
