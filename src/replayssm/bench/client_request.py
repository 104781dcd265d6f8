"""Checked options of `replayssm bench serve`. Needs no torch."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from replayssm.bench.client_data import Prompt, read_dataset, synthetic
from replayssm.checks import at_least, plot_file, writable
from replayssm.errors import OptionError

KEY_VARIABLES = ("REPLAYSSM_API_KEY", "OPENAI_API_KEY")
OPTIONS = (
    "url", "model", "endpoint", "concurrency", "rate", "requests", "warm_up", "dataset", "prompt_words",
    "output_tokens", "temperature", "seed", "timeout",
)  # fmt: skip
Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True)
class Load:
    """Either so many requests at once, each followed by the next, or arrivals at a rate a second (inf: all at once)."""

    kind: Literal["concurrency", "rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True)
class ClientRequest:
    """What to send where; `args` holds the plain switches, `dataset` the prompts of a file."""

    args: argparse.Namespace
    host: str
    port: int
    tls: bool
    base: str
    key: str | None
    endpoint: Endpoint
    loads: tuple[Load, ...]
    dataset: list[Prompt] | None
    plot_file: Path | None

    @property
    def command(self) -> str:
        """The command line that gives this request, defaults written out; without the key."""
        words = ["replayssm", "bench", "serve"]
        for name in OPTIONS:
            if (value := getattr(self.args, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, *(["--ignore-eos"] if self.args.ignore_eos else [])])

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ClientRequest:
        """Raises `OptionError` or `PromptError`."""
        args.json = args.json_file == "-"
        if importlib.util.find_spec("h11") is None:
            raise OptionError("bench serve needs h11, which is not installed: pip install 'replayssm[bench]'")
        host, port, tls, base = _url(args.url)
        if args.concurrency is not None and args.rate is not None:
            raise OptionError("--concurrency and --rate are two kinds of load; give one")
        if args.rate is not None:
            loads = tuple(Load("rate", rate) for rate in _numbers("--rate", args.rate))
        else:
            args.concurrency = args.concurrency or "1,8"
            loads = tuple(Load("concurrency", n) for n in _numbers("--concurrency", args.concurrency, whole=True))
        for name, least in (("requests", 1), ("warm_up", 0), ("prompt_words", 1), ("output_tokens", 1), ("seed", 0)):
            at_least(f"--{name.replace('_', '-')}", getattr(args, name), least)
        if not 0 <= args.temperature <= 2:
            raise OptionError(f"--temperature {args.temperature} is outside [0, 2]")
        if not 0 < args.timeout < math.inf:
            raise OptionError(f"--timeout {args.timeout} is no number of seconds above 0")
        if args.json_file is not None and not args.json:
            writable("--json", Path(args.json_file))
        plot = None if args.plot is None else plot_file(Path(args.plot))
        dataset = None
        if args.dataset is not None:
            dataset = read_dataset(Path(args.dataset), args.requests, args.output_tokens, args.seed)
        key = args.api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
        return cls(args, host, port, tls, base, key, args.endpoint, loads, dataset, plot)

    def prompts(self, load: Load) -> list[Prompt]:
        """Of one load: others than those of the loads before, unless they come from a file."""
        return self.dataset or self._synthetic(self.args.requests, f"{load.value:g}.")

    def warm_up(self, load: Load) -> list[Prompt]:
        """Sent before, one after the other; none of them comes again."""
        return self._synthetic(self.args.warm_up, f"w{load.value:g}.")

    def _synthetic(self, count: int, name: str) -> list[Prompt]:
        return synthetic(count, self.args.prompt_words, self.args.output_tokens, self.args.seed, name)

    def body(self, prompt: Prompt, model: str) -> dict[str, Any]:
        """Of one request."""
        args = self.args
        made: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        made |= {"max_tokens": prompt.max_tokens, "temperature": args.temperature, "seed": args.seed}
        if args.ignore_eos:
            made["ignore_eos"] = True
        if self.endpoint == "chat":
            return made | {"messages": prompt.messages}
        return made | {"prompt": prompt.text}


def _url(text: str) -> tuple[str, int, bool, str]:
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError as error:
        raise OptionError(f"--url {text!r}: {error}") from None
    if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment:
        raise OptionError(f"--url {text!r} is no address as in http://127.0.0.1:8000")
    tls = found.scheme == "https"
    path = found.path.rstrip("/").removesuffix("/v1")
    return found.hostname, port or (443 if tls else 80), tls, path


def _numbers(option: str, text: str, whole: bool = False) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        try:
            value = float(int(part)) if whole else float(part)
        except ValueError:
            value = math.nan
        if not value > 0:
            raise OptionError(f"{option} {part.strip()!r} is no {'whole ' if whole else ''}number above 0")
        found.append(value)
    return tuple(dict.fromkeys(found))
