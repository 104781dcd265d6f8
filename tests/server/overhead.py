"""What the server costs: the same requests through `LLM` and through HTTP streams, in turns, on one machine.

    python -m tests.server.overhead --rounds 5 --json docs/benchmarks/server/overhead.json

Server and client are processes of their own, as they would be for a user; the engine computes with one thread in both.
Wall clock says what a user sees; CPU time of the server's process (the client's is its own) says what the server adds
even where other processes disturb the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
ENGINE = r"""
import json, resource, sys, time
from replayssm import LLM, SamplingParams
from replayssm.bench.client_data import synthetic
asked = json.loads(sys.argv[1])
with LLM(asked["model"], max_requests=asked["concurrency"], device="cpu") as llm:
    params = SamplingParams(temperature=0, seed=0, max_tokens=asked["tokens"], ignore_eos=True)
    llm.generate("warm", params)
    for line in sys.stdin:
        prompts = [one.text for one in synthetic(asked["requests"], asked["words"], asked["tokens"], 0, line.strip())]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        start, cpu = time.perf_counter(), usage.ru_utime + usage.ru_stime
        found = llm.generate(prompts, params)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        tokens = sum(len(one.token_ids) for one in found)
        seconds = time.perf_counter() - start
        print(json.dumps([tokens, seconds, usage.ru_utime + usage.ru_stime - cpu]), flush=True)
"""


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def child(*words: str):
    made = subprocess.Popen(
        [sys.executable, *words], env=ENV, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.kill()
        made.wait()


def measure(model: str, concurrency: int, requests: int, tokens: int, words: int, rounds: int, folder: Path) -> dict:
    """Rates of both, round by round."""
    asked = json.dumps(
        {"model": model, "concurrency": concurrency, "requests": requests, "tokens": tokens, "words": words}
    )
    rows: list[dict[str, Any]] = []
    serve = (
        "-m",
        "replayssm.cli",
        "serve",
        model,
        "--port",
        "0",
        "--max-requests",
        str(concurrency),
        "--device",
        "cpu",
    )
    with child("-c", ENGINE, asked) as engine, child(*serve) as server:
        line = server.stdout.readline()
        url = "http" + line.partition("http")[2].split("/v1")[0]
        for i in range(rounds):
            row: dict[str, Any] = {"round": i}
            for who in ("engine", "server") if i % 2 == 0 else ("server", "engine"):
                if who == "engine":
                    print(f"{concurrency:g}.", file=engine.stdin, flush=True)
                    made, seconds, cpu = json.loads(engine.stdout.readline())
                else:
                    out, before = folder / "bench.json", cpu_of(server.pid)
                    client = [
                        sys.executable, "-m", "replayssm.cli", "bench", "serve", "--url", url, "--concurrency",
                        str(concurrency), "--requests", str(requests), "--output-tokens", str(tokens),
                        "--prompt-words", str(words), "--ignore-eos", "--warm-up", "0", "--json", str(out),
                    ]  # fmt: skip
                    subprocess.run(client, check=True, capture_output=True, env=ENV)
                    cpu = cpu_of(server.pid) - before
                    found = json.loads(out.read_text())["rows"][0]
                    made, seconds = found["output_tokens"], found["seconds"]
                row[who] = {"tokens": made, "seconds": seconds, "tokens_per_s": made / seconds, "cpu_seconds": cpu}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return {
        "model": model, "concurrency": concurrency, "requests": requests, "output_tokens": tokens,
        "prompt_words": words, "rounds": rows, **summary(rows),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Costs as fractions. Each round is compared within itself: what else the machine did changes between rounds."""
    pairs = [row["server"]["tokens_per_s"] / row["engine"]["tokens_per_s"] for row in rows]
    cpus = [row["server"]["cpu_seconds"] / row["engine"]["cpu_seconds"] for row in rows]
    return {"throughput_cost": 1 - statistics.median(pairs), "cpu_cost": statistics.median(cpus) - 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gdn")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    start = time.time()
    found = measure(
        args.model,
        args.concurrency,
        args.requests,
        args.tokens,
        args.words,
        args.rounds,
        Path(os.environ.get("TMPDIR", "/tmp")),
    )
    found |= {"cores": os.cpu_count(), "wall_seconds": time.time() - start}
    print(f"throughput cost {found['throughput_cost']:.1%}, CPU cost {found['cpu_cost']:.1%}")
    if args.json:
        Path(args.json).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
