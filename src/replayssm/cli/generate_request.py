"""Checked input of `generate`: prompts, sampling and engine options, refused before torch is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from replayssm.checks import writable
from replayssm.cli.options import Decode, named_as_options, read_prompt
from replayssm.cli.speculation import SPEC_STATES, spec_fields
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.errors import OptionError, PromptError
from replayssm.planner.request import parse_size

FILTERS = ("top_k", "top_p", "min_p")
FIELDS = (
    "temperature", *FILTERS, "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "logprobs",
    "n", "max_tokens",
)  # fmt: skip


class Line(NamedTuple):
    """A line of a JSONL file that is not blank, and its number, counted from 1."""

    number: int
    raw: bytes


class GenerateRequest(NamedTuple):
    """Checked input of `generate`; `args` holds the plain switches.

    `given` are the sampling options that the command line names. `lines` are those of `--jsonl`, None for one prompt.
    """

    args: argparse.Namespace
    given: dict[str, Any]
    params: SamplingParams
    engine: EngineOptions
    prompt: str = ""
    lines: list[Line] | None = None
    out: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> GenerateRequest:
        """Raises `OptionError`, `RingLengthError`, `DtypeError` or `PromptError`."""
        given = given_sampling(args)
        with named_as_options():
            params = sampling_params(given)
        _check_sampling(args, given)
        engine = _engine_options(args)
        if args.jsonl is None:
            _check_single(args)
            return cls(args, given, replace(params, seed=params.seed or 0), engine, prompt=read_prompt(args))
        if args.json:
            raise OptionError("--json has no effect with --jsonl, whose results are JSON already; drop it")
        out = None if args.out is None else writable("--out", Path(args.out))
        return cls(args, given, params, engine, lines=read_lines(args.jsonl), out=out)


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Greedy unless `given` has a temperature, or a filter, which then filters at temperature 1."""
    values = dict(given)
    values.setdefault("temperature", 1.0 if any(name in values for name in FILTERS) else 0.0)
    return SamplingParams(**values)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `SamplingParams` that the command line names."""
    given = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    if args.ignore_eos:
        given["ignore_eos"] = True
    if args.greedy:
        given.setdefault("temperature", 0.0)
    return given


def _check_sampling(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    if args.top_k == 0:
        raise OptionError("--top-k 0 is below 1; leave it out to keep all tokens")
    sampling = [f"{_option(name)} {given[name]}" for name in ("temperature", *FILTERS) if given.get(name)]
    if args.greedy and sampling:
        raise OptionError(f"--greedy contradicts {', '.join(sampling)}; drop one or the other")
    if args.temperature == 0 and sampling:
        raise OptionError(f"--temperature 0 is greedy and contradicts {', '.join(sampling)}")
    if args.seed is not None and not sampling and args.jsonl is None:
        raise OptionError(f"--seed {args.seed} has no effect on greedy decode; add --temperature, or drop it")


def _check_single(args: argparse.Namespace) -> None:
    for name in ("n", "max_requests", "out"):
        if (value := getattr(args, name)) is not None:
            raise OptionError(f"{_option(name)} {value} has no effect on one prompt; add --jsonl, or drop it")
    if args.prefix_cache:
        raise OptionError("--prefix-cache has no effect on one prompt; add --jsonl, or drop it")
    if args.logprobs is not None and not args.json:
        raise OptionError(f"--logprobs {args.logprobs} has no effect without --json or --jsonl; add one, or drop it")


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    decode = Decode.from_args(args)
    memory = None if args.memory is None else parse_size("--memory", args.memory)
    spec = {"ring_len": decode.ring_len, **spec_fields(vars(args), args.ring_len)}
    if args.no_replay and args.spec is not None and spec.get("spec_state", EngineOptions.spec_state) == "ring":
        others = ", ".join(state for state in SPEC_STATES if state != "ring")
        raise OptionError(f"--no-replay has no ring for --spec-state ring; drop it, or use one of {others}")
    with named_as_options():
        return EngineOptions(
            state_dtype=decode.state_dtype,
            mode="packed" if args.no_replay else "replay" if args.jsonl is None else "auto",
            memory=memory,
            max_requests=args.max_requests,
            chunk_tokens=args.chunk_tokens,
            context=args.context,
            prefix_cache=args.prefix_cache,
            **spec,
        )


def read_lines(source: str) -> list[Line]:
    """Lines of a file, '-' is standard input; blank ones are left out."""
    name = "standard input" if source == "-" else f"prompt file {source}"
    if source == "-" and sys.stdin is None:
        raise PromptError("standard input is closed; name a file")
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror or error}") from error
    every = raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    lines = [Line(number, line) for number, line in enumerate(every, 1) if line.strip()]
    if not lines:
        raise PromptError(f'{name} has no prompts; give lines like {{"prompt": "Once"}}')
    return lines


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
