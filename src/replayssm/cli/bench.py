"""`replayssm bench decode`: ceilings, then packed, replay and peers against them; a check before every number.

The JSON object:

    command        the command line, defaults written out
    name, layer    what was measured: kind, num_k_heads, num_v_heads, head_k_dim, head_v_dim, lower_bound, beta_scale
    ring_len, io_dtype, quick
    device         type, name, kernels; on a GPU capability and l2_bytes, on a CPU threads
    versions       of replayssm, python, torch and what else is there of cuda, triton and the peers
    ceilings       read and read_write in GB/s, launch_us
    skipped        peer and state dtype: why it did not run
    ok             no row failed
    rows           see `replayssm.bench.run`
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from replayssm.bench import ceilings, device, plot
from replayssm.bench.request import BenchRequest
from replayssm.bench.run import run
from replayssm.bench.timing import wanted_bytes
from replayssm.cli.console import human_bytes, print_json, print_table, step

HEADER = (
    "batch", "state", "kernel", "µs", "p10..p90", "GB/s", "of ceiling", "× packed", "auto", "× best peer", "check",
)  # fmt: skip


def run_command(request: BenchRequest) -> int:
    """Return 0, or 1 when a row failed."""
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
    if request.json_file == "-":
        print_json(result, request.args.out)
    elif request.json_file is not None:
        with open(request.json_file, "w", encoding="utf-8") as file:
            print_json(result, file)
    if request.plot_file is not None:
        title = f"{request.name}, L = {request.ring_len}, activations {request.io_dtype}, {facts['name']}"
        plot.plot(rows, title, request.plot_file)
        print(f"plot: {request.plot_file}", file=sys.stderr)
    return 1 if failed else 0


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
