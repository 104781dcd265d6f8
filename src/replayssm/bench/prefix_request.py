"""What `replayssm bench prefix` is asked to do. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from replayssm.bench.serving_request import ServingRequest
from replayssm.checks import at_least
from replayssm.engine.options import EngineOptions, Mode
from replayssm.errors import OptionError

PARTS = ("turns", "shared", "again", "tree")
TARGET_RATIO = 0.25  # TTFT of a second turn over that without a cache
TARGET_US = 100.0  # of a look into the tree, and of an entry
TREE_PAGES = (16, 64)
LEAST = dict(
    conversations=1,
    turns=2,  # the second one is what the target is for
    history=1,
    requests=2,  # the first one fills the cache
    system=1,
    repeat=2,
    interval=1,
    output_tokens=3,  # a request that was only prefilled still has one to make while another is on its way
    prefixes=1,
)


@dataclass(frozen=True)
class PrefixRequest(ServingRequest):
    """`bench prefix`: the `parts` that are asked for."""

    parts: tuple[str, ...] = ()

    suite = "prefix"
    options: ClassVar[tuple[str, ...]] = (
        "parts", "interval", "prefix_policy", "prefix_strategy", "conversations", "turns", "history", "requests",
        "system", "repeat", "prefixes", "depth",
    )  # fmt: skip

    @property
    def model_parts(self) -> tuple[str, ...]:
        """Those that run a model."""
        return tuple(part for part in self.parts if part != "tree")

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of the longest request of each part that runs a model, its answer included."""
        args = self.args
        new, answer = args.prompt_tokens, args.output_tokens
        found = dict(
            turns=args.history + (args.turns - 1) * new + args.turns * answer,
            shared=args.system + new + answer,
            again=args.repeat + 2 * answer,
        )
        return {part: int(found[part]) for part in self.model_parts}

    @property
    def tokens(self) -> int:
        """Of the longest request, prompt and output."""
        return max(self.lengths.values(), default=0)

    @property
    def extension(self) -> dict[int, int]:
        """By page size of the tree: tokens that a prefix adds to what it shares, an interval in whole pages."""
        return {size: -(-int(self.args.interval) // size) * size for size in TREE_PAGES}

    @classmethod
    def from_args(cls, args: Any) -> PrefixRequest:
        """Raises `OptionError`, `DtypeError` or `RingLengthError`."""
        parts = tuple(dict.fromkeys(part.strip() for part in args.parts.split(",")))
        for part in parts:
            if part not in PARTS:
                raise OptionError(f"--parts {part!r} is unknown; use one or more of {', '.join(PARTS)}")
        for name, least in LEAST.items():
            at_least(f"--{name.replace('_', '-')}", getattr(args, name), least)
        if args.plot is not None and "turns" not in parts:
            raise OptionError(f"--plot shows turns, and --parts {args.parts} has none; add turns")
        found = cls(**cls._shared(args), parts=parts)
        if "tree" in parts:
            at_least("--depth", args.depth, max(found.extension.values()) + max(TREE_PAGES))
        if args.context is not None:
            found._check_lengths(args.context, f"above --context {args.context}")
        found.prefix_options(found.modes[0], found.state_dtypes[0], args.context, cache=True)
        return found

    def context(self, positions: int) -> int:
        """See `ServingRequest.context`."""
        self._check_lengths(positions, f"the model has {positions} positions")
        return super().context(positions)

    def prefix_options(self, mode: Mode, state_dtype: str, context: int | None, cache: bool) -> EngineOptions:
        """Of an engine with the cache, or without."""
        args, plain = self.args, self.engine_options(mode, state_dtype, context, None)
        if not cache:
            return plain
        return replace(
            plain, prefix_cache=True, prefix_interval=args.interval, prefix_policy=args.prefix_policy,
            prefix_strategy=args.prefix_strategy,
        )  # fmt: skip

    def _check_lengths(self, most: int, limit: str) -> None:
        args = self.args
        said = dict(
            turns=f"--history {args.history}, --turns {args.turns} with --prompt-tokens {args.prompt_tokens}",
            shared=f"--system {args.system}, --prompt-tokens {args.prompt_tokens}",
            again=f"--repeat {args.repeat}",
        )
        for part, tokens in self.lengths.items():
            if tokens > most:
                asked = f"{said[part]} and --output-tokens {args.output_tokens}"
                raise OptionError(f"part {part}: {asked} make {tokens} tokens, {limit}")
