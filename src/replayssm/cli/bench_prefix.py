"""`replayssm bench prefix`: the prefix cache, warm against cold.

The JSON object:

    command, device, versions, ok
    name, weights, layers, all_layers, dtype, context   of the model; null where no part ran one
    …              the options of the requests, the cache and the ring
    targets        of a second turn's TTFT over that without a cache; µs of a look into the tree and of an entry
    rows           see `replayssm.bench.prefix_rows`
    reuse, caches  see `replayssm.bench.prefix`
    plans          for each mode and state dtype the memory of the engine with a cache
    tree           see `replayssm.bench.prefix_tree`
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import __version__ as transformers_version

from replayssm.bench import device, prefix, prefix_tree
from replayssm.bench.plot import MARKERS
from replayssm.bench.prefix_request import TARGET_RATIO, TARGET_US, PrefixRequest
from replayssm.cli.bench_model import load_for
from replayssm.cli.bench_output import write_json, write_plot
from replayssm.cli.console import human_bytes, print_table, step

HEADER = (
    "part", "case", "state", "mode", "prompt", "cold ms", "warm ms", "ratio", "cached", "hit rate", "target", "check",
)  # fmt: skip
CACHE_HEADER = (
    "part", "state", "mode", "asked", "had pages", "taken over", "snapshots", "evicted states", "evicted pages",
    "kept states", "kept pages",
)  # fmt: skip
TREE_HEADER = ("page size", "match µs", "p99", "insert µs", "p99", "fresh µs", "evict µs", "target")
GIVEN = (
    "parts", "interval", "prefix_policy", "prefix_strategy", "conversations", "turns", "history", "requests", "system",
    "repeat", "prefixes", "depth", "prompt_tokens", "output_tokens", "ring_len", "chunk_tokens", "memory_fraction",
    "seed",
)  # fmt: skip


def run_command(request: PrefixRequest) -> int:
    """Return 0, or 1 when a row failed."""
    args, where = request.args, device.resolve(request.args.device)
    facts, software = device.describe(where), device.versions() | {"transformers": transformers_version}
    result: dict[str, Any] = dict(command=request.command, device=facts, versions=software)
    result |= dict.fromkeys(("name", "weights", "layers", "all_layers", "dtype", "context"))
    result |= {name: getattr(args, name) for name in GIVEN}
    result |= dict(targets=dict(turn_ratio=TARGET_RATIO, tree_us=TARGET_US))
    found, title = prefix.PrefixResult(), "the tree of prefixes"
    if request.model_parts:
        found, title = _with_model(request, where, result)
    print(f"{title}, {facts['name']}\n")
    if found.rows:
        _print_rows(found)
    tree = prefix_tree.run(request, step) if "tree" in request.parts else []
    if tree:
        print(f"\ntree of {args.prefixes} prefixes of {args.depth} tokens\n")
        print_table(TREE_HEADER, [_tree_cells(row) for row in tree])
    failed = [row for row in [*found.rows, *tree] if row["status"] != "ok"]
    for row in failed:
        print(f"FAILED {_name(row)}: {row['error']}")
    result |= dict(ok=not failed, **vars(found), tree=tree)
    write_json(result, args)
    write_plot(request.plot_file, lambda file: plot(found.rows, f"{title}, {facts['name']}", file))
    return 1 if failed else 0


def _with_model(request: PrefixRequest, where: torch.device, result: dict[str, Any]) -> tuple[prefix.PrefixResult, str]:
    plan, context, loaded = load_for(request, where)
    result |= dict(name=plan.name, weights="random weights" if plan.random else "loaded", layers=plan.layers)
    result |= dict(all_layers=plan.all_layers, dtype=request.dtype, context=context)
    args = request.args
    title = (
        f"{plan.name}, {plan.layers} of {plan.all_layers} layers, {request.dtype}, a state each {args.interval} tokens"
    )
    return prefix.run(request, loaded, context, step), f"{title}, ring of {args.ring_len}"


def _print_rows(found: prefix.PrefixResult) -> None:
    print_table(HEADER, [_cells(row) for row in found.rows], left=4)
    print("\ncold and warm: median TTFT without a cache and with one; cached: tokens of a prompt that it took over\n")
    print_table(CACHE_HEADER, [_cache_cells(row) for row in found.caches], left=3)
    print()
    for row in found.reuse:
        same = {True: "equal", False: "NOT equal", None: "unknown, a row failed"}[row["equal"]]
        print(
            f"reused in {row['part']}, state {row['state_dtype']}: {row['reused_on']} tokens in mode {row['mode']}, "
            f"{row['reused_off']} packed: {same}"
        )
    for row in found.rows:
        for name, check in (row["check"] or {}).items():
            if row["status"] == "ok" and check["position"] is not None:
                print(
                    f"near-tie {_name(row)}, {name}: request {check['request']} differs from packed at token "
                    f"{check['position']}, gap {check['gap']:.2g}, limit {check['limit']:.2g}"
                )
    for note in dict.fromkeys(f"{row['mode']}: {note}" for row in found.rows for note in row["notes"]):
        print(f"note {note}")


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time to the first token by turn, cold and warm; part of the prompts that came from the cache."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    times, hits = figure.subplots(1, 2)
    places = list(dict.fromkeys((row["part"], row["case"]) for row in rows))
    lines = list(dict.fromkeys((row["mode"], row["state_dtype"]) for row in rows))
    for i, (mode, state) in enumerate(lines):
        mine = [r for r in rows if (r["mode"], r["state_dtype"]) == (mode, state) and r["status"] == "ok"]
        turns = [row for row in mine if row["part"] == "turns"]
        for name, style in (("cold", "--"), ("warm", "-")):
            at, middle = [int(r["case"]) for r in turns], [r[f"{name}_ms"]["median"] for r in turns]
            times.plot(
                at,
                middle,
                style,
                marker=MARKERS[i % len(MARKERS)],
                color=f"C{i}",
                label=f"{mode}, state {state}, {name}",
            )
        width = 0.8 / len(lines)
        at_bars = [places.index((r["part"], r["case"])) + (i - (len(lines) - 1) / 2) * width for r in mine]
        hits.bar(at_bars, [r["hit_rate"] for r in mine], width, color=f"C{i}")
    times.set_xticks(sorted({int(case) for part, case in places if part == "turns"}))
    times.set_xlabel("turn")
    times.set_ylabel("TTFT, ms (median)")
    times.set_ylim(bottom=0)
    hits.set_xticks(range(len(places)), [f"{part}: {case}" for part, case in places], rotation=35, ha="right")
    hits.set_ylabel("hit rate of prompt tokens")
    hits.set_ylim(0, 1)
    for axes in (times, hits):
        axes.grid(alpha=0.3)
    times.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _name(row: dict[str, Any]) -> str:
    if "part" not in row:
        return f"tree, pages of {row['page_size']}"
    return f"{row['part']} {row['case']}, mode {row['mode']}, state {row['state_dtype']}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["part"], row["case"], row["state_dtype"], row["mode"])
    if row["status"] != "ok":
        return (*head, "FAILED", *("–",) * 6, "see below")
    near = [one["status"] for one in row["check"].values() if one["status"] != "equal"]
    return (
        *head,
        str(row["prompt_tokens"]),
        f"{row['cold_ms']['median']:.1f}",
        f"{row['warm_ms']['median']:.1f}",
        f"{row['ratio']:.3f}",
        f"{mean(row['cached_tokens']):.0f}",
        f"{row['hit_rate']:.3f}",
        _target(row, "≤" if row["part"] == "turns" else "≥"),
        near[0] if near else "equal",
    )


def _cache_cells(row: dict[str, Any]) -> tuple[str, ...]:
    hit, size = row["hit_tokens"], row["bytes"]
    counts = (row["asked"], hit["kv"], hit["usable"], row["snapshots"], *row["evicted"].values())
    sizes = (human_bytes(size["states"]), human_bytes(size["pages"]))
    return (row["part"], row["state_dtype"], row["mode"], *map(str, counts), *sizes)


def _tree_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return (str(row["page_size"]), "FAILED", *("–",) * 5, "see below")
    times = (row["match_us"], row["insert_us"])
    pairs = [f"{one[key]:.0f}" for one in times for key in ("mean", "p99")]
    rest = [f"{row[name]['mean']:.0f}" for name in ("fresh_us", "evict_us")]
    return (str(row["page_size"]), *pairs, *rest, _target(row, "<"))


def _target(row: dict[str, Any], sign: str) -> str:
    target = row["target_us"] if "target_us" in row else row["target"]
    return "–" if target is None else f"{sign} {target:g} {'met' if row['met'] else 'MISSED'}"
