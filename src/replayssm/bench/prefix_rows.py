"""What one part of `replayssm bench prefix` found, case by case: judged first, then measured.

Of each case:

    part, case, mode, state_dtype     which
    status, error, check              "ok" or "failed", and why; verdicts on cold and warm answers
    requests, prompt_tokens           how many, and how long each prompt is
    cold_ms, warm_ms                  time to the first token: {mean, median, p99}
    ratio                             of the medians, warm over cold
    cached_tokens                     of each request: what its prompt did not have to compute
    hit_rate                          of all their prompt tokens
    target, met                       of `ratio` at most, or of `cached_tokens` at least; null where there is none
    notes                             what else to know
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from replayssm.bench import serving_check
from replayssm.bench.prefix_request import TARGET_RATIO, PrefixRequest
from replayssm.bench.serving_check import Reference, Transcript
from replayssm.bench.serving_stats import summary
from replayssm.engine.options import Mode


class Said(NamedTuple):
    """Of a request: prompt and answer, seconds to the first token, tokens that came from the cache."""

    transcript: Transcript
    ttft: float
    cached: int


class Script(NamedTuple):
    """Prompts of a part, and what packed decode without a cache says to them."""

    texts: list[list[int]]
    reference: Reference


@dataclass
class Trial:
    """A part in one mode, first without the cache, then with it."""

    part: str
    mode: Mode
    state_dtype: str
    cold: list[Said] = field(default_factory=list)
    warm: list[Said] = field(default_factory=list)
    cache: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=lambda: dict(error=None))


def cases(request: PrefixRequest, part: str) -> list[tuple[str, slice]]:
    """Names and requests of the rows of a part."""
    args = request.args
    if part == "turns":
        each = args.conversations
        return [(str(turn + 1), slice(turn * each, (turn + 1) * each)) for turn in range(args.turns)]
    if part == "shared":
        return [("first", slice(0, 1)), ("others", slice(1, None))]
    return [(name, slice(at, at + 1)) for at, name in enumerate(("first", "while it runs", "with its answer"))]


def rows(request: PrefixRequest, trial: Trial, scripts: dict[str, Script]) -> list[dict[str, Any]]:
    """Of a part in one mode."""
    found = []
    exact = request.dtype == trial.state_dtype == "float32"
    for case, where in cases(request, trial.part):
        row: dict[str, Any] = dict(part=trial.part, case=case, mode=trial.mode, state_dtype=trial.state_dtype)
        row |= dict(status="failed", error=trial.found["error"], notes=trial.notes)
        row |= dict.fromkeys(("check", "requests", "prompt_tokens", "cold_ms", "warm_ms", "ratio", "cached_tokens"))
        row |= dict.fromkeys(("hit_rate", "target", "met"))
        if row["error"] is None:
            theirs = scripts[trial.part].reference
            reference = replace(theirs, transcripts=theirs.transcripts[where])
            _judge(row, trial.cold[where], trial.warm[where], reference, exact)
        if row["error"] is None:
            row["status"] = "ok"
            _measure(row, trial.cold[where], trial.warm[where])
            _hold(row, request)
        found.append(row)
    return found


def _judge(row: dict[str, Any], cold: list[Said], warm: list[Said], reference: Reference, exact: bool) -> None:
    row["check"] = {}
    for name, said in (("cold", cold), ("warm", warm)):
        verdict = serving_check.judge([one.transcript for one in said], reference)
        row["check"][name] = verdict.as_json()
        if not verdict.ok or (exact and verdict.status != "equal"):
            row["error"] = row["error"] or f"{name} against packed decode without a cache: {verdict}"


def _measure(row: dict[str, Any], cold: list[Said], warm: list[Said]) -> None:
    cold_ms, warm_ms = (summary([one.ttft for one in said]) for said in (cold, warm))
    assert cold_ms is not None
    assert warm_ms is not None
    lengths, cached = [len(one.transcript.prompt) for one in warm], [one.cached for one in warm]
    row |= dict(requests=len(warm), prompt_tokens=max(lengths), cold_ms=cold_ms, warm_ms=warm_ms)
    row |= dict(ratio=warm_ms["median"] / cold_ms["median"], cached_tokens=cached, hit_rate=sum(cached) / sum(lengths))


def _hold(row: dict[str, Any], request: PrefixRequest) -> None:
    """Against its target, if there is one."""
    args, length = request.args, row["prompt_tokens"]
    if (row["part"], row["case"]) == ("turns", "2"):
        row |= dict(target=TARGET_RATIO, met=row["ratio"] <= TARGET_RATIO)
    elif row["part"] == "again" and row["case"] != "first":
        least = (length - 1) // args.interval * args.interval
        if row["case"] == "with its answer":
            # up to the last fold, the state of which is what a request leaves under this policy
            lost = args.ring_len - 1 if args.prefix_policy == "truncate" and row["mode"] != "packed" else 0
            least = length - 1 - lost
        row |= dict(target=least, met=min(row["cached_tokens"]) >= least)


def reuse(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens that were taken over with replay and without, part by part; null where a row of either failed."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["part"], row["state_dtype"], row["mode"]), []).append(row)
    count = {
        key: None if any(row["status"] != "ok" for row in group) else sum(sum(row["cached_tokens"]) for row in group)
        for key, group in groups.items()
    }
    found = []
    for (part, state_dtype, mode), mine in count.items():
        if mode != "packed" and (part, state_dtype, "packed") in count:
            off = count[part, state_dtype, "packed"]
            equal = None if mine is None or off is None else mine == off
            found.append(
                dict(part=part, mode=mode, state_dtype=state_dtype, reused_on=mine, reused_off=off, equal=equal)
            )
    return found
