"""Checked options of `replayssm bench throughput` and `bench latency`, before torch is imported."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from replayssm.bench import serving_configs
from replayssm.checks import at_least, batch_sizes, plot_file, writable
from replayssm.dtypes import parse_state_dtype
from replayssm.engine.options import EngineOptions, Mode
from replayssm.errors import OptionError

DEFAULT_MODEL = "gdn"
LEAST_CONTEXT = 256
SHARED = (
    "layers", "dtype", "mode", "state_dtype", "prompt_tokens", "output_tokens", "seed", "ring_len", "chunk_tokens",
    "page_size", "memory_fraction", "context",
)  # fmt: skip
LAST = ("device", "json_file", "plot")
FLAGS = ("no_graphs", "no_overlap")


@dataclass(frozen=True)
class ServingRequest:
    """What to run; `args` holds the plain switches. `config` is a name or file for random weights, else None."""

    args: argparse.Namespace
    model: str | None
    config: str | None
    dtype: str
    modes: tuple[Mode, ...]
    state_dtypes: tuple[str, ...]
    plot_file: Path | None

    suite: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()

    @property
    def tokens(self) -> int:
        """Of a request, prompt and output."""
        return int(self.args.prompt_tokens + self.args.output_tokens)

    @property
    def most(self) -> int | None:
        """Requests at once that the engine must hold; None: as many as it can."""
        return None

    @property
    def command(self) -> str:
        """The command line that gives this request, defaults written out."""
        words = ["replayssm", "bench", self.suite, *([] if self.model is None else [self.model])]
        given = {**vars(self.args), "dtype": self.dtype}
        for name in ("config", *self.options, *SHARED, *LAST):
            value = given[name]
            words += [] if value is None else [f"--{name.removesuffix('_file').replace('_', '-')}", str(value)]
        return shlex.join(words + [f"--{name.replace('_', '-')}" for name in FLAGS if given[name]])

    def context(self, positions: int) -> int:
        """Longest request that the engine is set up for: by default the next power of two, for a model of `positions`.

        Raises `OptionError` when the requests are longer than the model's positions.
        """
        if self.tokens > positions:
            raise OptionError(
                f"--prompt-tokens {self.args.prompt_tokens} and --output-tokens {self.args.output_tokens} make "
                f"{self.tokens} tokens, the model has {positions} positions"
            )
        if self.args.context is not None:
            if self.args.context > positions:
                raise OptionError(f"--context {self.args.context} exceeds the model's {positions} positions")
            return int(self.args.context)
        return min(positions, max(LEAST_CONTEXT, 1 << (self.tokens - 1).bit_length()))

    def engine_options(self, mode: Mode, state_dtype: str, context: int | None, most: int | None) -> EngineOptions:
        """Of the engine for one mode and state dtype."""
        args = self.args
        return EngineOptions(
            ring_len=args.ring_len, state_dtype=state_dtype, mode=mode, memory_fraction=args.memory_fraction,
            max_requests=most, chunk_tokens=args.chunk_tokens, page_size=args.page_size, context=context,
            graphs=not args.no_graphs, overlap=False if args.no_overlap else None,
        )  # fmt: skip

    def ramp(self, requests: int) -> int:
        """Steps that the prompts of `requests` requests take at most."""
        return -(-requests * int(self.args.prompt_tokens) // (int(self.args.chunk_tokens) - 1))

    @classmethod
    def _shared(cls, args: argparse.Namespace) -> dict[str, Any]:
        """Fields that both suites have, checked. `args.json` becomes what the other commands mean by it."""
        args.json = args.json_file == "-"
        if args.config is not None and args.model is not None:
            raise OptionError(f"MODEL {args.model} has weights of its own, --config {args.config} asks for random ones")
        if args.config is None and args.layers is not None:
            raise OptionError(f"--layers {args.layers} needs --config: a model with weights runs whole")
        if args.layers is not None:
            at_least("--layers", args.layers)
        if args.config is not None and not _is_path(args.config):
            _, fields = serving_configs.find(args.config)
            if args.layers is not None and args.layers > fields["num_hidden_layers"]:
                raise OptionError(f"--layers {args.layers} exceeds the {fields['num_hidden_layers']} of {args.config}")
        for name in ("prompt_tokens", "output_tokens", "seed"):
            at_least(f"--{name.replace('_', '-')}", getattr(args, name), 0 if name == "seed" else 1)
        modes = tuple(dict.fromkeys(part.strip() for part in args.mode.split(",")))
        for mode in modes:
            if mode not in get_args(Mode):
                raise OptionError(f"--mode {mode!r} is unknown; use one or more of {', '.join(get_args(Mode))}")
        states = tuple(dict.fromkeys(parse_state_dtype(d, "--state-dtype") for d in args.state_dtype.split(",")))
        if args.context is not None and args.prompt_tokens + args.output_tokens > args.context:
            raise OptionError(
                f"--prompt-tokens {args.prompt_tokens} and --output-tokens {args.output_tokens} make "
                f"{args.prompt_tokens + args.output_tokens} tokens, above --context {args.context}"
            )
        if args.json_file is not None and not args.json:
            writable("--json", Path(args.json_file))
        plot = None if args.plot is None else plot_file(Path(args.plot))
        model = None if args.config is not None else args.model or DEFAULT_MODEL
        dtype = args.dtype or ("float32" if args.config is None else "bfloat16")
        found = dict(args=args, model=model, config=args.config, dtype=dtype, modes=modes, state_dtypes=states)
        return found | dict(plot_file=plot)

    def _checked(self) -> None:
        """What the engine itself refuses."""
        self.engine_options(self.modes[0], self.state_dtypes[0], self.args.context, None)


@dataclass(frozen=True)
class ThroughputRequest(ServingRequest):
    """`bench throughput`: `batches` requests at once, one after the other."""

    batches: tuple[int, ...] = ()

    suite = "throughput"
    options: ClassVar[tuple[str, ...]] = ("batch",)

    @property
    def most(self) -> int:
        """The largest batch."""
        return max(self.batches)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ThroughputRequest:
        """Raises `OptionError`, `DtypeError` or `RingLengthError`."""
        found = cls(**cls._shared(args), batches=batch_sizes(args.batch))
        found._checked()
        ramp = found.ramp(found.most)
        least = ramp + args.ring_len + 1
        if args.output_tokens < least:
            raise OptionError(
                f"--output-tokens {args.output_tokens} leaves no ring period of {args.ring_len} steps in which all "
                f"{found.most} requests decode, since their prompts take up to {ramp} steps; ask for {least} or more"
            )
        return found


@dataclass(frozen=True)
class LatencyRequest(ServingRequest):
    """`bench latency`: `count` requests arrive at each of `rates` a second; infinity is all at once."""

    count: int = 1
    rates: tuple[float, ...] = ()

    suite = "latency"
    options = ("rate", "requests", "max_requests")

    @property
    def most(self) -> int | None:
        """--max-requests."""
        found: int | None = self.args.max_requests
        return found

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> LatencyRequest:
        """Raises `OptionError`, `DtypeError` or `RingLengthError`."""
        count = at_least("--requests", args.requests)
        if args.max_requests is not None:
            at_least("--max-requests", args.max_requests)
        rates = tuple(dict.fromkeys(_rate(part) for part in args.rate.split(",")))
        found = cls(**cls._shared(args), count=count, rates=rates)
        found._checked()
        return found


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise OptionError(f"--rate {text.strip()!r} is no number of requests a second above 0; inf is all at once")
    return value


def _is_path(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long for the file system, an unknown ~user
        return False
