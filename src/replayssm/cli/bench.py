"""`replayssm bench`: one layer against ceilings, or the engine under load; a check before every number.

The JSON object of `decode`:

    command        the command line, defaults written out
    name, layer    what was measured: kind, num_k_heads, num_v_heads, head_k_dim, head_v_dim, lower_bound, beta_scale
    ring_len, io_dtype, quick
    device         type, name, kernels; on a GPU capability and l2_bytes, on a CPU threads
    versions       of replayssm, python, torch and what else is there of cuda, triton and the peers
    ceilings       read and read_write in GB/s, launch_us
    skipped        peer and state dtype: why it did not run
    ok             no row failed
    rows           see `replayssm.bench.run`

That of `throughput` and `latency`:

    command, device, versions, ok
    name, weights  of the model; "loaded" or "random weights"
    layers, all_layers, parameters, dtype
    ring_len, prompt_tokens, output_tokens, context, chunk_tokens, memory_fraction, graphs, overlap, seed
    measured       how, in words
    plans          for each mode and state dtype the engine's memory: budget, split by purpose, slots, tokens,
                   page_size
    rows           see `replayssm.bench.serving`
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import __version__ as transformers_version

from replayssm.bench import ceilings, device, plot, serving, serving_busy, serving_model, serving_plot
from replayssm.bench.request import BenchRequest
from replayssm.bench.run import run
from replayssm.bench.serving_request import LatencyRequest, ServingRequest, ThroughputRequest
from replayssm.bench.timing import wanted_bytes
from replayssm.cli.bench_model import load_for
from replayssm.cli.bench_output import write_json, write_plot
from replayssm.cli.console import human_bytes, print_table, step

HEADER = (
    "batch", "state", "kernel", "µs", "p10..p90", "GB/s", "of ceiling", "× packed", "auto", "× best peer", "check",
)  # fmt: skip


THROUGHPUT_HEADER = (
    "batch", "state", "mode", "decode tok/s", "× packed", "TPOT ms", "p99", "TTFT ms", "p99", "tok/s", "GPU busy",
    "memory", "steps", "route", "check",
)  # fmt: skip
LATENCY_HEADER = (
    "rate", "state", "mode", "tok/s", "× packed", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "e2e ms", "p99",
    "memory", "check",
)  # fmt: skip


def run_command(request: BenchRequest | ServingRequest) -> int:
    """Return 0, or 1 when a row failed."""
    return _decode(request) if isinstance(request, BenchRequest) else _serve(request)


def _decode(request: BenchRequest) -> int:
    where = device.resolve(request.device)
    facts, software = device.describe(where), device.versions()
    with step(f"ceilings of {where}"):
        roof = ceilings.measure(where, request.quick)
    _print_head(request, facts, software, roof)
    wanted = wanted_bytes(where, request.quick)
    why = "3 × L2" if where.type == "cuda" else "a fixed size; caches of this CPU may hold part of it"
    print(f"working set above {human_bytes(wanted)} ({why})\n", flush=True)

    rows, skipped = run(request, where, roof, step)
    print_table(HEADER, [_cells(row) for row in rows], left=3)
    print("\n× is how many times faster; packed against the read+write ceiling, replay against the read ceiling")
    print("auto: what mode auto takes at this batch, and how many times faster than packed that is")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for note in dict.fromkeys(f"{row['kernel']}: {note}" for row in rows for note in row["notes"]):
        print(f"note {note}")
    failed = [row for row in rows if row["status"] != "ok"]
    for row in failed:
        print(f"FAILED {row['kernel']}, B = {row['batch']}, state {row['state_dtype']}: {row['error']}")

    spec = {key: value for key, value in asdict(request.spec).items() if key != "conv_kernel"}
    result: dict[str, Any] = dict(command=request.command, name=request.name, layer=spec)
    result |= dict(ring_len=request.ring_len, io_dtype=request.io_dtype, quick=request.quick, device=facts)
    result |= dict(versions=software, ceilings=roof._asdict(), skipped=skipped, ok=not failed, rows=rows)
    write_json(result, request.args)
    title = f"{request.name}, L = {request.ring_len}, activations {request.io_dtype}, {facts['name']}"
    write_plot(request.plot_file, lambda file: plot.plot(rows, title, file))
    return 1 if failed else 0


def _serve(request: ServingRequest) -> int:
    where = device.resolve(request.args.device)
    facts, software = device.describe(where), device.versions() | {"transformers": transformers_version}
    plan, context, loaded = load_for(request, where)
    size = sum(x.numel() for x in loaded.model.parameters())
    _print_serving_head(request, plan, size, context, facts, software)
    measured: dict[str, Any] = {}
    if isinstance(request, ThroughputRequest):
        found = serving.throughput(request, loaded, context, step, _say)
        print_table(THROUGHPUT_HEADER, [_throughput_cells(row) for row in found.rows], left=3)
        print("\nTPOT and decode tok/s: steps in which all requests decode, whole ring periods; tok/s: the whole run")
        measured["window"] = (
            "wall clock over engine steps in which all requests decode, a whole number of ring periods, the device "
            "synchronised at both ends; everything was compiled and recorded by an equal run before it"
        )
        measured |= dict(gpu_busy=serving_busy.HOW if where.type == "cuda" else None)
    else:
        assert isinstance(request, LatencyRequest)
        found = serving.latency(request, loaded, context, step, _say)
        print_table(LATENCY_HEADER, [_latency_cells(row) for row in found.rows], left=3)
        print("\nmedian and p99; a request that waits for its turn has arrived already")
        measured["arrivals"] = "a Poisson process for each rate; times of tokens are those at which a listener has them"
    measured["memory"] = "peak of the GPU's allocations" if where.type == "cuda" else "peak of the process"
    failed = [row for row in found.rows if row["status"] != "ok"]
    for row in found.rows:
        name = f"{row['mode']}, state {row['state_dtype']}, {_load(row)}"
        check = row["check"]
        if check and check["position"] is not None and row["status"] == "ok":
            print(
                f"near-tie {name}: request {check['request']} differs from packed at token {check['position']}, gap "
                f"{check['gap']:.2g}, limit {check['limit']:.2g}"
            )
        for note in row["notes"]:
            print(f"note {name}: {note}")
    for row in failed:
        print(f"FAILED {row['mode']}, state {row['state_dtype']}, {_load(row)}: {row['error']}")

    args = request.args
    result: dict[str, Any] = dict(command=request.command, name=plan.name)
    result |= dict(weights="random weights" if plan.random else "loaded", layers=plan.layers)
    result |= dict(all_layers=plan.all_layers, parameters=size, dtype=request.dtype, context=context)
    for name in ("ring_len", "prompt_tokens", "output_tokens", "chunk_tokens", "memory_fraction", "seed"):
        result[name] = getattr(args, name)
    on_gpu = where.type == "cuda"
    result |= dict(graphs=on_gpu and not args.no_graphs, overlap=on_gpu and not args.no_overlap)
    result |= dict(device=facts, versions=software, measured=measured, plans=found.plans)
    result |= dict(ok=not failed, rows=found.rows)
    write_json(result, request.args)
    draw = serving_plot.throughput if request.suite == "throughput" else serving_plot.latency
    title = f"{_model_line(request, plan, size)}, {facts['name']}"
    write_plot(request.plot_file, lambda file: draw(found.rows, title, file))
    return 1 if failed else 0


def _print_serving_head(
    request: ServingRequest,
    plan: serving_model.Plan,
    size: int,
    context: int,
    facts: dict[str, str | int],
    software: dict[str, str],
) -> None:
    args = request.args
    work = f"{args.prompt_tokens} prompt tokens, {args.output_tokens} output tokens, greedy, random prompts"
    switches = [name for name, off in (("graphs", args.no_graphs), ("overlap", args.no_overlap)) if off]
    engine = f"ring of {args.ring_len}, {args.chunk_tokens} prompt tokens a step, context {context}"
    print_table(
        ("", ""),
        (
            ("model", _model_line(request, plan, size)),
            ("device", ", ".join(f"{key} {value}" for key, value in facts.items())),
            ("versions", ", ".join(f"{name} {number}" for name, number in software.items())),
            ("requests", work),
            ("engine", engine + "".join(f", no {name}" for name in switches)),
        ),
        left=2,
    )
    print(flush=True)


def _model_line(request: ServingRequest, plan: serving_model.Plan, size: int) -> str:
    count = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million"
    words = [plan.name, f"{count} parameters", request.dtype]
    words += ["random weights"] if plan.random else []
    words += [f"{plan.layers} of {plan.all_layers} layers"] if plan.layers != plan.all_layers else []
    return ", ".join(words)


def _say(plan: dict[str, Any]) -> None:
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in plan["split"].items() if size)
    print(
        f"memory, mode {plan['mode']}, state {plan['state_dtype']}: {plan['slots']} slots, {plan['tokens']} tokens of "
        f"context; of {human_bytes(plan['budget'])}: {parts}",
        flush=True,
    )


def _load(row: dict[str, Any]) -> str:
    if "batch" in row:
        return f"B = {row['batch']}"
    return "all at once" if row["rate"] is None else f"rate {row['rate']:g}"


def _throughput_cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (str(row["batch"]), row["state_dtype"], row["mode"])
    if row["status"] != "ok":
        return (*head, "FAILED", *("–",) * 10, "see below")
    busy = row["gpu_busy"]
    return (
        *head,
        _number(row["decode_tokens_per_s"]),
        _times(row["vs_packed"]),
        _number(row["tpot_ms"]["mean"]),
        _number(row["tpot_ms"]["p99"]),
        _number(row["ttft_ms"]["mean"]),
        _number(row["ttft_ms"]["p99"]),
        _number(row["tokens_per_s"]),
        "–" if busy is None else f"{100 * busy:.0f} %",
        human_bytes(row["memory_bytes"]),
        str(row["steps"]),
        row["route"],
        row["check"]["status"],
    )


def _latency_cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = ("inf" if row["rate"] is None else f"{row['rate']:g}", row["state_dtype"], row["mode"])
    if row["status"] != "ok":
        return (*head, "FAILED", *("–",) * 10, "see below")
    times = [row[f"{name}_ms"] for name in ("ttft", "tpot", "itl", "e2e")]
    return (
        *head,
        _number(row["tokens_per_s"]),
        _times(row["vs_packed"]),
        *("–" if found is None else _number(found[key]) for found in times for key in ("median", "p99")),
        human_bytes(row["memory_bytes"]),
        row["check"]["status"],
    )


def _print_head(
    request: BenchRequest, facts: dict[str, str | int], software: dict[str, str], roof: ceilings.Ceilings
) -> None:
    spec = request.spec
    layer = f"{spec.kind}, {spec.num_k_heads}/{spec.num_v_heads} heads, K/V {spec.head_k_dim}/{spec.head_v_dim}"
    lines = (
        ("device", ", ".join(f"{key} {value}" for key, value in facts.items())),
        ("versions", ", ".join(f"{name} {number}" for name, number in software.items())),
        ("layer", f"{request.name} ({layer})" if request.args.model else layer),
        ("decode", f"ring of {request.ring_len}, activations {request.io_dtype}, one token a row, one layer"),
        ("read ceiling", f"{roof.read:.1f} GB/s"),
        ("read+write ceiling", f"{roof.read_write:.1f} GB/s, in place"),
        ("launch floor", f"{roof.launch_us:.2f} µs"),
    )
    print_table(("", ""), lines, left=2)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (str(row["batch"]), row["state_dtype"], row["kernel"])
    if row["status"] != "ok":
        return (*head, "FAILED", *("–",) * 4, _auto(row), "–", "see below")
    verdict = row["check"]
    return (
        *head,
        _number(row["us"]),
        f"{_number(row['us_p10'])}..{_number(row['us_p90'])}",
        _number(row["gb_per_s"]),
        f"{row['of_ceiling']:.3f}",
        _times(row["vs_packed"]),
        _auto(row),
        _times(row["vs_best_peer"]),
        f"{verdict['output']:.0e} {verdict['state']:.0e}",
    )


def _auto(row: dict[str, Any]) -> str:
    return f"{row['auto_route']} {_times(row['auto_vs_packed'])}" if row["auto_route"] else "–"


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else "–"


def _number(x: float) -> str:
    """At least three digits, none of them needless."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
