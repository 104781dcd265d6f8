"""What is said of replay and 16-bit states, held against the numbers of a study.

The claims are those of the design that this package implements. Each comes with the number that decides it; a claim
that fails anywhere is refuted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replayssm.spec import DEFAULT_RING_LEN

Rows = list[dict[str, Any]]
SETTLED = 1024  # steps after which an error that does not accumulate has stopped growing
GROWTH = 1.5  # times, from there to the end: what is still called no accumulation


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """claim, decided_by, value, holds; a claim whose numbers were not measured is left out."""
    found = []
    for claim, decided_by, measure in CLAIMS:
        value, holds = measure(result)
        if value is not None:
            found.append(dict(claim=claim, decided_by=decided_by, value=value, holds=holds))
    return found


def _last(rows: Rows, **wanted: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The last mark of each kind and decay, of one setting."""
    rows = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return {(row["kind"], row["decay"]): row for row in rows if row["steps"] == max(r["steps"] for r in rows)}


def _replay(result: dict[str, Any], dtype: str, operands: str = "exact") -> dict[tuple[str, str], dict[str, Any]]:
    return _last(result["drift"], route="replay", state_dtype=dtype, ring_len=DEFAULT_RING_LEN, operands=operands)


def _packed(result: dict[str, Any], dtype: str) -> dict[tuple[str, str], dict[str, Any]]:
    return _last(result["drift"], route="packed", state_dtype=dtype)


def _least_ratio(over: dict[Any, Any], under: dict[Any, Any], what: str = "state_error") -> float | None:
    return min((over[at][what] / under[at][what] for at in over.keys() & under.keys()), default=None)


Verdict = tuple[float | None, bool]


def _fp16_drifts_less(result: dict[str, Any]) -> Verdict:
    ratios = [
        _least_ratio(of(result, "bfloat16"), of(result, "float16"), what)
        for of in (_packed, _replay)
        for what in ("state_error", "output_error")
    ]
    found = [ratio for ratio in ratios if ratio is not None]
    return (min(found), min(found) > 1) if found else (None, False)


def _old_errors_fade(result: dict[str, Any]) -> Verdict:
    rows = result["forgetting"]
    last = max((row["steps"] for row in rows), default=None)
    left = [row["left"] for row in rows if row["steps"] == last]
    return (max(left), max(left) < 0.01) if left else (None, False)


def _no_accumulation(result: dict[str, Any]) -> Verdict:
    growth = []
    for dtype in ("float32", "float16", "bfloat16"):
        for at, end in _replay(result, dtype).items():
            early = [
                row["state_error"]
                for row in result["drift"]
                if (row["operands"], row["state_dtype"], row["ring_len"]) == ("exact", dtype, DEFAULT_RING_LEN)
                and (row["kind"], row["decay"]) == at
                and row["steps"] == SETTLED < end["steps"]
            ]
            growth += [end["state_error"] / error for error in early]
    return (max(growth), max(growth) <= GROWTH) if growth else (None, False)


def _replay_drifts_less(dtypes: tuple[str, ...]) -> Callable[[dict[str, Any]], Verdict]:
    def measure(result: dict[str, Any]) -> Verdict:
        found = [r for d in dtypes if (r := _least_ratio(_packed(result, d), _replay(result, d))) is not None]
        return (min(found), min(found) > 1) if found else (None, False)

    return measure


def _rounding_costs(operands: str) -> Callable[[dict[str, Any]], Verdict]:
    def measure(result: dict[str, Any]) -> Verdict:
        rounded, exact = _replay(result, "float32", operands), _replay(result, "float32")
        ratio = _least_ratio(rounded, exact, "output_error")
        return ratio, ratio is not None and ratio > 10

    return measure


def _text(result: dict[str, Any], dtype: str, route: str) -> dict[str, dict[str, Any]]:
    length = DEFAULT_RING_LEN if route == "replay" else None
    return {
        model: row
        for model, rows in result["text"].items()
        for row in rows
        if (row["route"], row["state_dtype"], row["ring_len"]) == (route, dtype, length)
        and row["operands"] in (None, "exact")
    }


def _fewer_repeats(result: dict[str, Any]) -> Verdict:
    """fp16 minus bf16, the largest over models, routes and ways to decode."""
    gaps = [
        half[model][what] - brain[model][what]
        for route in ("packed", "replay")
        for half, brain in ((_text(result, "float16", route), _text(result, "bfloat16", route)),)
        for model in half.keys() & brain.keys()
        for what in ("greedy_repeats", "sampled_repeats")
    ]
    return (max(gaps), max(gaps) < 0) if gaps else (None, False)


CLAIMS: list[tuple[str, str, Callable[[dict[str, Any]], Verdict]]] = [
    (
        "fp16 is the better 16-bit state: it drifts less than bf16",
        "error of bf16 over that of fp16, least of all layers, both routes, state and output",
        _fp16_drifts_less,
    ),
    (
        "with fp16 a model repeats itself less than with bf16",
        "repetition rate of fp16 minus that of bf16, largest over models, routes, greedy and sampled",
        _fewer_repeats,
    ),
    (
        "decay and overwriting wipe out an old error",
        "what is left of an error of step 0 at the last step, most of all layers",
        _old_errors_fade,
    ),
    (
        "errors do not accumulate over flushes",
        f"state error at the last step over that at step {SETTLED}, largest of all layers and dtypes, replay",
        _no_accumulation,
    ),
    (
        "a 16-bit state drifts less under replay than under packed decode",
        "state error of packed over that of replay, least of all layers, fp16 and bf16",
        _replay_drifts_less(("float16", "bfloat16")),
    ),
    (
        "so does an fp32 state",
        "the same ratio for fp32",
        _replay_drifts_less(("float32",)),
    ),
    (
        "tf32 operands in the rebuild cost more than ten times the exact readout's output error",
        "their ratio, least of all layers",
        _rounding_costs("tf32"),
    ),
    (
        "bf16 operands cost more than ten times the exact readout's output error",
        "their ratio, least of all layers",
        _rounding_costs("bf16"),
    ),
]
