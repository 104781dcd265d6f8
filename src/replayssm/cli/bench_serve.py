"""`replayssm bench serve`: load for a server, a row for each.

The JSON object: `command`, `url`, `model`, `endpoint`, `dataset`, `machine` (of the client), `ok`, and `rows`, see
`replayssm.bench.client`.
"""

from __future__ import annotations

import asyncio
import os
import platform
from typing import Any

from replayssm.bench import client, client_plot
from replayssm.bench.client_request import ClientRequest, Load
from replayssm.cli.bench_output import write_json, write_plot
from replayssm.cli.console import print_table, step
from replayssm.errors import OptionError

TIMES = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "itl_ms": "ITL ms", "e2el_ms": "E2EL ms"}


def run_command(request: ClientRequest) -> int:
    """Return 0, or 1 when a request failed."""
    args = request.args
    try:
        model = args.model or asyncio.run(client.model_of(request))
    except (client.Failed, OSError) as error:
        raise OptionError(f"--url {args.url} does not answer: {error}") from None
    rows = []
    for load in request.loads:
        with step(f"{load}, {args.requests} requests"):
            asyncio.run(_warm_up(request, load, model))
            rows.append(client.row_of(load, asyncio.run(client.run(request, load, model))))
    _print(request, model, rows)
    ok = not any(row["failures"] for row in rows)
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "platform": platform.platform()}
    result: dict[str, Any] = {"command": request.command, "url": args.url, "model": model, "endpoint": args.endpoint}
    result |= {"dataset": args.dataset, "machine": machine, "ok": ok, "rows": rows}
    write_json(result, args)
    write_plot(request.plot_file, lambda file: client_plot.plot(rows, f"{model} at {args.url}", file))
    return 0 if ok else 1


async def _warm_up(request: ClientRequest, load: Load, model: str) -> None:
    for prompt in request.warm_up(load):
        await client.ask(request, model, prompt)


def _print(request: ClientRequest, model: str, rows: list[dict[str, Any]]) -> None:
    kind = request.loads[0].kind
    header = [kind, "failed", "tok/s", "req/s", "tokens in", "out"]
    for name in TIMES.values():
        header += [name, "median", "p99"]
    print(f"{model} at {request.args.url}, {request.endpoint}, {request.args.requests} requests at each load\n")
    print_table(tuple(header), [tuple(_cells(row)) for row in rows])
    print("\ntimes: mean, median and p99 in milliseconds, seen by the client")
    if any(row["counted"] == "chunks" for row in rows):
        print("the server sends no usage: tokens are counted as chunks of text")
    for row in rows:
        load = "all at once" if row["load"] is None else f"{kind} {row['load']:g}"
        for why, count in row["failures"].items():
            print(f"FAILED {load}: {count} × {why}")


def _cells(row: dict[str, Any]) -> list[str]:
    load = "inf" if row["load"] is None else f"{row['load']:g}"
    tokens = "–" if row["prompt_tokens"] is None else str(row["prompt_tokens"])
    failed = row["requests"] - row["completed"]
    cells = [load, str(failed), f"{row['output_tokens_per_s']:.1f}", f"{row['requests_per_s']:.2f}", tokens]
    cells.append(str(row["output_tokens"]))
    for key in TIMES:
        found = row[key]
        cells += ["–"] * 3 if found is None else [f"{found[name]:.1f}" for name in ("mean", "median", "p99")]
    return cells
