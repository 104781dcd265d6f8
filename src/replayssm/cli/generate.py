"""`replayssm generate`: text as it comes, then what it cost and whether it is what stock decode would have said."""

from __future__ import annotations

import argparse
from typing import Any

from replayssm.cli.compare import Verdict, compare
from replayssm.cli.console import counter, human_bytes, print_json, print_table, step, write
from replayssm.cli.decoding import Route, Run, encode, load, peak_memory, run, state_dtype
from replayssm.cli.options import Decode, GenerateRequest, Sampling
from replayssm.models.loading import LoadedModel
from replayssm.spec import packed_traffic, replay_traffic


def run_command(request: GenerateRequest) -> int:
    """Return 0, or 1 when the tokens differ from packed or stock decode by more than a near-tie."""
    args, text, max_tokens, sampling, decode = request
    route: Route = "packed" if args.no_replay else "replay"

    with step(f"loading {args.model}", args.quiet):
        loaded = load(args.model, args.dtype, args.device)
        prompt = encode(loaded, text, max_tokens)
        dtype = state_dtype(loaded, decode)

    writes = not (args.quiet and args.json)
    if writes and not args.quiet:
        write(text, dim=True)
    main = run(loaded, prompt, route, decode, sampling, max_tokens, on_text=write if writes else None)
    if writes:
        write("\n")
    memory = peak_memory(loaded)

    runs: dict[Route, Run] = {route: main}
    verdicts: list[Verdict] = []
    if not args.no_check:
        for other in ("packed", "stock") if route == "replay" else ("stock",):
            with counter(f"checking against {NAMES[other]}", len(main.tokens), args.quiet) as tick:
                runs[other] = run(loaded, prompt, other, decode, sampling, max_tokens, on_token=tick)
                verdicts.append(compare(loaded, prompt, decode, sampling, (route, main), (other, runs[other])))

    traffic = _traffic(loaded, runs, decode, dtype.name)
    if not args.quiet:
        print()
        _print_summary(loaded, args, prompt.length, main, memory, traffic, verdicts)
        ring = "no ring" if args.no_replay else f"ring of {decode.ring_len}"
        print(f"\nstate {dtype.name} ({dtype.source}), {ring}, model {args.dtype}, {_sampling(sampling)}")
    if args.json:
        result = {
            "model": args.model,
            "route": route,
            "text": loaded.tokenizer.decode(main.tokens, skip_special_tokens=True),
            "token_ids": main.tokens,
            "finish_reason": main.finish_reason,
            "prompt_tokens": prompt.length,
            "prompt_seconds": main.prompt_seconds,
            "prompt_tokens_per_second": _rate(prompt.length, main.prompt_seconds),
            "generated_tokens": len(main.tokens),
            "generated_seconds": main.decode_seconds,
            "generated_tokens_per_second": _rate(main.decode_steps, main.decode_seconds),
            "peak_memory_bytes": memory[0],
            "peak_memory_of": memory[1],
            "ring_len": None if args.no_replay else decode.ring_len,
            "state_dtype": dtype.name,
            "state_dtype_source": dtype.source,
            "dtype": args.dtype,
            "sampling": None if sampling.greedy else vars(sampling),
            "traffic_bytes_per_token": traffic,
            "flushes": _flushes(loaded, main),
            "check": {verdict.reference: verdict.as_json() for verdict in verdicts} or None,
        }
        print_json(result, args.out)
    return 0 if all(verdict.ok for verdict in verdicts) else 1


NAMES: dict[Route, str] = {"replay": "replay", "packed": "packed decode", "stock": "stock transformers"}
PARTS = ("state_read", "state_written", "ring_read", "ring_written")


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds > 0 else None


def _flushes(loaded: LoadedModel, main: Run) -> int:
    assert main.traffic is not None
    return main.traffic["flushes"] // len(loaded.specs)


def _traffic(loaded: LoadedModel, runs: dict[Route, Run], decode: Decode, dtype: str) -> dict[str, Any]:
    """Bytes per decoded token, all layers: what the ops counted, or computed where no run has counted."""
    result: dict[str, Any] = {}
    for route, done in runs.items():
        if done.traffic is not None and done.traffic["rows"]:
            steps = done.traffic["rows"] / len(loaded.specs)
            result[route] = {"source": "counted", **{part: done.traffic[part] / steps for part in PARTS}}
    if "packed" not in result:
        read, written = (sum(column) for column in zip(*(packed_traffic(s, dtype) for s in loaded.specs), strict=True))
        result["packed"] = dict(zip(("source", *PARTS), ("computed", read, written, 0, 0), strict=True))
    for numbers in result.values():
        numbers["total"] = sum(numbers[part] for part in PARTS)
    if "replay" in result:
        io = str(loaded.model.dtype).removeprefix("torch.")
        period = sum(replay_traffic(s, decode.ring_len, dtype, io).total for s in loaded.specs)
        result["ratio"] = result["replay"]["total"] / result["packed"]["total"]
        result["ratio_whole_period"] = period / result["packed"]["total"]
    return result


def _print_summary(
    loaded: LoadedModel,
    args: argparse.Namespace,
    prompt_tokens: int,
    main: Run,
    memory: tuple[int, str],
    traffic: dict[str, Any],
    verdicts: list[Verdict],
) -> None:
    def per_second(rate: float | None) -> str:
        return "–" if rate is None else f"{rate:.1f}"

    print_table(
        ("", "tokens", "seconds", "tokens/s"),
        [
            (
                "prompt",
                str(prompt_tokens),
                f"{main.prompt_seconds:.2f}",
                per_second(_rate(prompt_tokens, main.prompt_seconds)),
            ),
            (
                "generated",
                str(len(main.tokens)),
                f"{main.decode_seconds:.2f}",
                per_second(_rate(main.decode_steps, main.decode_seconds)),
            ),
        ],
    )
    print()

    routes = [route for route in ("replay", "packed") if route in traffic]
    rows = []
    for part in (*PARTS, "total"):
        cells = [human_bytes(traffic[route][part]) for route in routes]
        if len(routes) == 2:
            cells.append(_ratio(traffic["replay"][part], traffic["packed"][part]))
        rows.append((part.replace("_", " "), *cells))
    titles = [f"{route} ({traffic[route]['source']})" for route in routes]
    print_table(("bytes per token", *titles, *(("ratio",) if len(routes) == 2 else ())), rows)

    facts = [
        ("ended by", "the end token" if main.finish_reason == "eos" else f"--max-tokens {args.max_tokens}"),
        ("state flushes", f"{_flushes(loaded, main)} in {main.decode_steps} steps, each of {len(loaded.specs)} layers"),
    ]
    facts.append(("peak memory", f"{human_bytes(memory[0])} ({memory[1]})"))
    for verdict in verdicts:
        facts.append((f"against {NAMES[verdict.reference]}", verdict.describe(_tokens(loaded, verdict))))
    if args.no_check:
        facts.append(("check", "left out (--no-check)"))
    print()
    print_table(("", ""), facts, left=2)


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.3f}" if whole else "–"


def _tokens(loaded: LoadedModel, verdict: Verdict) -> tuple[str, str]:
    got, expected = (("" if t is None else str(loaded.tokenizer.decode([t]))) for t in (verdict.got, verdict.expected))
    return got, expected


def _sampling(sampling: Sampling) -> str:
    if sampling.greedy:
        return "greedy"
    kept = f", top-k {sampling.top_k}" if sampling.top_k else ""
    kept += f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature:g}{kept}, seed {sampling.seed}"
