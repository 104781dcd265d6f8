"""`replayssm plan`: bytes per request and per step, the best ring by bytes, requests that fit. Runs no model.

The JSON object; all sizes are bytes of one tensor-parallel shard:

    model, source      what was looked up, and where it was found
    layer              one linear layer: kind, heads, dims, conv_kernel, lower_bound, beta_scale
    linear_layers      how many there are
    attention          layers, and what each caches for a token: kv_heads × head_dim twice, or latent; and index
    settings           ring_len, state_dtype and who chose it, io_dtype, kv_dtype, context, tp
    weights            bytes (0: not counted) and source
    request            state, ring, conv, kv of one layer each; of all layers for packed and for replay, with total
    spec               null, or drafts, window, ring_len, and by strategy the memory of a request; per_snapshot:
                       requests that fit where one of the strategy `snapshot` does, with KV and without
    step               a row per batch: read, written, total of one layer and of all, packed and replay; their ratio;
                       simplest: all layers by the estimate that knows the state only
    ring               one row, all layers: bytes_by_length for L = 1 … 64, where they are fewest (best; best_formula
                       and best_real by the formulas of docs/mathematics.md) and at the chosen L
    capacity           null, or memory, weights, reserve and a row per mode and strategy: requests
"""

from __future__ import annotations

import sys
from typing import Any

from replayssm.cli.console import human_bytes, print_json, print_table
from replayssm.planner import plot
from replayssm.planner.report import report
from replayssm.planner.request import PlanRequest

PARTS = ("state", "ring", "conv", "drafts", "kv", "total")
TITLES = ("state", "ring", "conv", "drafts", "KV", "in all")
RATIOS = ("per_snapshot", "per_snapshot_without_kv")


def run_command(request: PlanRequest) -> int:
    """Print the tables, or the same as JSON."""
    result = report(request)
    _print_head(request, result)
    _print_request(result)
    if result["spec"]:
        _print_spec(request, result["spec"])
    _print_step(result)
    _print_ring(result["ring"])
    if result["capacity"]:
        _print_capacity(result["capacity"])
    if request.args.json:
        print_json(result, request.args.out)
    if request.plot_file is not None:
        dtypes = f"state {request.settings.state_dtype}, activations {request.settings.io_dtype}"
        plot.plot(result, f"{result['model']}, {dtypes}", request.plot_file)
        print(f"plot: {request.plot_file}", file=sys.stderr)
    return 0


def _print_head(request: PlanRequest, result: dict[str, Any]) -> None:
    spec, attention, settings = request.geometry.spec, request.geometry.attention, request.settings
    layer = f"{spec.kind}, {spec.num_k_heads}/{spec.num_v_heads} heads, K/V {spec.head_k_dim}/{spec.head_v_dim}"
    cached = (
        f"latent {attention.latent}" if attention.latent else f"{attention.kv_heads} KV heads of {attention.head_dim}"
    )
    cached += f", indexer {attention.index}" if attention.index else ""
    weights = f"{human_bytes(request.weights)} ({request.weights_source})"
    if not request.weights:
        weights = f"unknown, not counted ({request.weights_source}); --weights says"
    lines = [
        ("model", f"{result['model']}, from {result['source']}"),
        ("linear layers", f"{result['linear_layers']} ({layer})"),
        ("attention layers", f"{attention.layers} ({cached})" if attention.layers else "0"),
        ("weights", weights),
        ("state", f"{settings.state_dtype} ({request.state_dtype_source})"),
        ("activations, KV", f"{settings.io_dtype}, {settings.kv_dtype}"),
        ("ring, context", f"{settings.ring_len} records, {settings.context} tokens"),
    ]
    if request.tp > 1:
        lines.append(("shard", f"one of {request.tp}; every figure is one shard's"))
    print_table(("", ""), lines, left=2)


def _print_request(result: dict[str, Any]) -> None:
    one, held = result["request"]["layer"], result["request"]
    rows = [
        ("KV" if name == "kv" else name, human_bytes(one[name]), *_sizes(held, name))
        for name in ("state", "ring", "conv", "kv")
    ]
    rows.append(("in all", "", *_sizes(held, "total")))
    print()
    print_table(("memory of a request", "one layer", "all, packed", "all, replay"), rows)


def _print_spec(request: PlanRequest, spec: dict[str, Any]) -> None:
    rows = [
        (name, *(human_bytes(held[key]) for key in PARTS), *(f"{held[key]:.2f}" for key in RATIOS))
        for name, held in spec["strategies"].items()
    ]
    print()
    title = f"a request with {spec['drafts']} drafts"
    print_table((title, *TITLES, "requests per snapshot's", "without KV"), rows)
    if spec["ring_len"] is not None:
        chosen = "" if request.args.ring_len is not None else "; --ring-len takes another"
        print(f"ring of {spec['ring_len']}, for windows of {spec['window']} tokens{chosen}")
    print(
        f"drafts: inputs of the conv for {spec['window']} tokens, snapshots a state for each of them besides; a draft "
        "model's or head's own memory is not in it"
    )


def _sizes(held: dict[str, Any], name: str) -> tuple[str, str]:
    return human_bytes(held["packed"][name]), human_bytes(held["replay"][name])


def _print_step(result: dict[str, Any]) -> None:
    rows = []
    for row in result["step"]:
        for name in ("layer", "all"):
            cells = [_moved(row[name][mode]) for mode in ("packed", "replay")]
            rows.append((str(row["batch"]), "one" if name == "layer" else "all", *cells, f"{row['ratio']:.3f}"))
        simple = [human_bytes(row["simplest"][mode]) for mode in ("packed", "replay")]
        rows.append((str(row["batch"]), "all, state alone", *simple, "0.5"))
    print()
    header = ("bytes of a step, batch", "layers", "packed: read + written", "replay: read + written", "ratio")
    print_table(header, rows, left=2)
    print("state alone: packed reads and writes it, replay reads it; vectors and folds left out")


def _moved(traffic: dict[str, float]) -> str:
    return f"{human_bytes(traffic['read'])} + {human_bytes(traffic['written'])}"


def _print_ring(ring: dict[str, Any]) -> None:
    share = [f"{ring[key] / ring['packed_bytes']:.3f}" for key in ("best_bytes", "chosen_bytes")]
    print(
        f"\nfewest bytes at L = {ring['best']} (minimum over real L: {ring['best_real']:.1f}): {share[0]} of packed, "
        f"{share[1]} at L = {ring['chosen']}"
    )
    print(
        "Fewest bytes is not fastest: on an H200 L = 8 is faster than L = 16 wherever both were timed "
        '(docs/benchmarks, "Rings of other lengths")'
    )


def _print_capacity(capacity: dict[str, Any]) -> None:
    sizes = {key: human_bytes(capacity[key]) for key in ("memory", "weights", "reserve")}
    print(f"\nrequests in {sizes['memory']}, of which weights {sizes['weights']}, kept free {sizes['reserve']}")
    drafting = any(row["draft_tokens"] for row in capacity["rows"])
    parts = [i for i, part in enumerate(PARTS) if part != "drafts" or drafting]
    base = next((row["requests"] for row in capacity["rows"] if row["mode"] == "snapshot"), 0)
    rows = [
        (
            _mode(row),
            *(human_bytes(row[PARTS[i]]) for i in parts),
            str(row["requests"]),
            *((f"{row['requests'] / base:.2f}" if row["draft_tokens"] else "–",) if base else ()),
        )
        for row in capacity["rows"]
    ]
    print_table(("decode", *(TITLES[i] for i in parts), "requests", *(("per snapshot's",) if base else ())), rows)


def _mode(row: dict[str, Any]) -> str:
    return f"{row['draft_tokens']} drafts, {row['mode']}" if row["draft_tokens"] else row["mode"]
