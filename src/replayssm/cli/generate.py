"""`replayssm generate`: text as it comes, then what it cost and whether it is what stock decode would have said."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from replayssm.cli import speculation
from replayssm.cli.compare import Verdict, compare
from replayssm.cli.console import counter, human_bytes, print_json, print_table, step, write
from replayssm.cli.decoding import Route, Run, encode, end_tokens, load, peak_memory, state_dtype
from replayssm.cli.generate_request import GenerateRequest
from replayssm.cli.many import run_many
from replayssm.cli.memory import print_memory
from replayssm.cli.routes import run, without_drafts
from replayssm.engine.core import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.models.loading import LoadedModel, find_model
from replayssm.models.mtp import check_mtp
from replayssm.spec import packed_traffic, replay_traffic


def run_command(request: GenerateRequest) -> int:
    """Return 0, or 1 when the tokens differ from packed or stock decode by more than a near-tie, or a line failed."""
    if request.lines is not None:
        return run_many(request)
    args, params, options, text = request.args, request.params, request.engine, request.prompt
    plain = without_drafts(options)
    route: Route = plain if options.spec is None else "spec"
    if options.spec == "mtp":
        check_mtp(find_model(args.model), args.model)

    with step(f"loading {args.model}", args.quiet):
        loaded = load(args.model, args.dtype, args.device)
        end_tokens(loaded)
        prompt = encode(loaded, text, params.max_tokens, options.context)
        dtype = state_dtype(loaded, options)

    writes = not (args.quiet and args.json)
    if not args.quiet and (note := speculation.ring_note(options, args.ring_len)) is not None:
        print(note, file=sys.stderr)

    def start(engine: Engine) -> None:
        if not args.quiet:
            print_memory(engine)
            write(text, dim=True)

    main = run(loaded, prompt, route, options, params, on_start=start, on_text=write if writes else None)
    if writes:
        write("\n")
    memory = peak_memory(loaded)

    runs: dict[Route, Run] = {route: main}
    verdicts: list[Verdict] = []
    if not args.no_check:
        for other in CHECKS[route] if route != "spec" else (plain, "stock"):
            with counter(f"checking against {NAMES[other]}", len(main.tokens), args.quiet) as tick:
                runs[other] = run(loaded, prompt, other, options, params, on_token=tick)
                verdicts.append(compare(loaded, prompt, options, params, (route, main), (other, runs[other])))

    traffic = _traffic(loaded, runs, options.ring_len, dtype.name)
    drafts = None if options.spec is None else _drafts(options, main, runs.get(plain))
    ring_len = options.ring_len if plain == "replay" else None
    if not args.quiet:
        print()
        _print_summary(loaded, args, prompt.length, main, memory, traffic, verdicts, drafts)
        ring = "no ring" if ring_len is None else f"ring of {ring_len}"
        print(f"\nstate {dtype.name} ({dtype.source}), {ring}, model {args.dtype}, {_sampling(params)}")
    if args.json:
        result = {
            "model": args.model,
            "route": route,
            "text": main.text,
            "token_ids": main.tokens,
            "finish_reason": main.finish_reason,
            "prompt_tokens": prompt.length,
            "prompt_seconds": main.prompt_seconds,
            "prompt_tokens_per_second": _rate(prompt.length, main.prompt_seconds),
            "generated_tokens": len(main.tokens),
            "generated_seconds": main.decode_seconds,
            "generated_tokens_per_second": main.rate,
            "drafted": main.drafted,
            "drafts_kept": main.drafts_kept,
            "spec": drafts,
            "peak_memory_bytes": memory[0],
            "peak_memory_of": memory[1],
            "ring_len": ring_len,
            "state_dtype": dtype.name,
            "state_dtype_source": dtype.source,
            "dtype": args.dtype,
            "sampling": {name: getattr(params, name) for name in SAMPLING},
            "traffic_bytes_per_token": traffic,
            "flushes": _flushes(loaded, main),
            "check": {verdict.reference: verdict.as_json() for verdict in verdicts} or None,
        }
        if params.logprobs is not None:
            result["logprobs"] = [logprob._asdict() for logprob in main.logprobs]
        print_json(result, args.out)
    return 0 if all(verdict.ok for verdict in verdicts) else 1


NAMES: dict[Route, str] = {
    "spec": "decode with drafts", "replay": "replay", "packed": "packed decode", "stock": "stock transformers",
}  # fmt: skip
CHECKS: dict[Route, tuple[Route, ...]] = {"replay": ("packed", "stock"), "packed": ("stock",)}
TITLES: dict[Route, str] = {"spec": "with drafts", "replay": "replay", "packed": "packed"}
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "ignore_eos",
)  # fmt: skip
PARTS = ("state_read", "state_written", "ring_read", "ring_written")


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds > 0 else None


def _drafts(options: EngineOptions, main: Run, plain: Run | None) -> dict[str, Any]:
    """How speculation went; `speedup` is tokens a second over those of the run without drafts, where there was one."""
    rate, before = main.rate, None if plain is None else plain.rate
    return {
        "drafter": options.spec,
        "tokens": options.spec_tokens,
        "state": options.spec_state,
        "adaptive": options.spec_adaptive,
        "drafted": main.drafted,
        "drafts_kept": main.drafts_kept,
        "acceptance": main.drafts_kept / main.drafted if main.drafted else None,
        "steps": main.decode_steps,
        "tokens_per_step": main.decoded / main.decode_steps if main.decode_steps else None,
        "without": NAMES[without_drafts(options)],
        "speedup": rate / before if rate and before else None,
    }


def _drafts_line(drafts: dict[str, Any]) -> str:
    if not drafts["drafted"]:
        return f"none in {drafts['steps']} steps: nothing could be guessed, or it did not pay"
    said = f"{drafts['drafted']} drafted, {drafts['drafts_kept']} kept ({100 * drafts['acceptance']:.1f} %), "
    said += f"{drafts['tokens_per_step']:.2f} tokens a step"
    return said + (f", {drafts['speedup']:.2f} × as fast as {drafts['without']}" if drafts["speedup"] else "")


def _flushes(loaded: LoadedModel, main: Run) -> int:
    assert main.traffic is not None
    return main.traffic["flushes"] // len(loaded.specs)


def _traffic(loaded: LoadedModel, runs: dict[Route, Run], ring_len: int, dtype: str) -> dict[str, Any]:
    """Bytes per decoded token, all layers: what the ops counted, or computed where no run has counted."""
    result: dict[str, Any] = {}
    for route, done in runs.items():
        if done.traffic is not None and done.traffic["rows"]:
            tokens = done.decoded if route == "spec" else done.traffic["rows"] / len(loaded.specs)
            result[route] = {"source": "counted", **{part: done.traffic[part] / tokens for part in PARTS}}
    if "packed" not in result:
        read, written = (sum(column) for column in zip(*(packed_traffic(s, dtype) for s in loaded.specs), strict=True))
        result["packed"] = dict(zip(("source", *PARTS), ("computed", read, written, 0, 0), strict=True))
    for numbers in result.values():
        numbers["total"] = sum(numbers[part] for part in PARTS)
    if "replay" in result:
        io = str(loaded.model.dtype).removeprefix("torch.")
        period = sum(replay_traffic(s, ring_len, dtype, io).total for s in loaded.specs)
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
    drafts: dict[str, Any] | None,
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
                per_second(main.rate),
            ),
        ],
    )
    print()

    routes = [route for route in TITLES if route in traffic]
    rows = []
    for part in (*PARTS, "total"):
        cells = [human_bytes(traffic[route][part]) for route in routes]
        if len(routes) > 1:
            cells.append(_ratio(traffic[routes[0]][part], traffic["packed"][part]))
        rows.append((part.replace("_", " "), *cells))
    titles = [f"{TITLES[route]} ({traffic[route]['source']})" for route in routes]
    print_table(("bytes per token", *titles, *(("ratio",) if len(routes) > 1 else ())), rows)

    facts = [
        ("ended by", _end(main, args.max_tokens)),
        ("state flushes", f"{_flushes(loaded, main)} in {main.decode_steps} steps, each of {len(loaded.specs)} layers"),
    ]
    if drafts is not None:
        facts.append(("drafts", _drafts_line(drafts)))
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


def _end(main: Run, max_tokens: int) -> str:
    if main.stopped is not None:
        return f"--stop {main.stopped!r}"
    return "the end token" if main.finish_reason == "stop" else f"--max-tokens {max_tokens}"


def _sampling(params: SamplingParams) -> str:
    penalties = ", ".join(
        f"{kind} penalty {value:g}"
        for kind, unused in (("repetition", 1), ("presence", 0), ("frequency", 0))
        if (value := getattr(params, f"{kind}_penalty")) != unused
    )
    if params.greedy:
        return "greedy" + (f", {penalties}" if penalties else "")
    parts = [f"temperature {params.temperature:g}"]
    parts += [f"top-k {params.top_k}"] if params.top_k else []
    parts += [f"top-p {params.top_p:g}"] if params.top_p < 1 else []
    parts += [f"min-p {params.min_p:g}"] if params.min_p else []
    parts += [penalties] if penalties else []
    return ", ".join([*parts, f"seed {params.seed}"])
