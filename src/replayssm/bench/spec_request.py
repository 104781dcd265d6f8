"""What `replayssm bench spec` is asked to do. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from replayssm.bench.serving_request import ThroughputRequest
from replayssm.checks import at_least
from replayssm.engine.options import EngineOptions, SpecState
from replayssm.errors import OptionError
from replayssm.spec import DEFAULT_RING_LEN

NONE = "none"
WARM_STEPS = 8


@dataclass(frozen=True)
class SpecRequest(ThroughputRequest):
    """`bench spec`: `strategies` at each batch size, with `drafts` drafts of which `acceptance` are right."""

    strategies: tuple[str, ...] = ()

    suite = "spec"
    options: ClassVar[tuple[str, ...]] = ("batch", "spec_state", "spec_tokens", "acceptance", "steps")

    @classmethod
    def from_args(cls, args: Any) -> SpecRequest:
        """Raises `OptionError`, `DtypeError` or `RingLengthError`."""
        if not 0 <= args.acceptance <= 1:
            raise OptionError(f"--acceptance {args.acceptance} is no chance; use 0…1")
        asked = tuple(dict.fromkeys(part.strip() for part in args.spec_state.split(",")))
        for name in asked:
            if name not in get_args(SpecState):
                raise OptionError(
                    f"--spec-state {name!r} is unknown; use one or more of {', '.join(get_args(SpecState))}"
                )
        at_least("--steps", args.steps)
        at_least("--spec-tokens", args.spec_tokens)
        args.mode = "auto"
        args.output_tokens = (args.steps + WARM_STEPS + 2) * (args.spec_tokens + 1)
        base = ThroughputRequest.from_args(args)
        found = cls(**vars(base), strategies=(NONE, *asked))
        for name in asked:
            found.spec_options(name, found.state_dtypes[0], None)
        return found

    def spec_options(self, strategy: str, state_dtype: str, context: int | None) -> EngineOptions:
        """Of the engine for one strategy."""
        plain = self.engine_options("packed" if strategy == "packed" else "auto", state_dtype, context, self.most)
        if strategy in (NONE, "packed"):
            return replace(plain, ring_len=DEFAULT_RING_LEN)  # what decodes fastest without windows
        spec: Any = dict(spec="ngram", spec_tokens=self.args.spec_tokens, spec_state=strategy, spec_adaptive=False)
        return replace(plain, **spec)
