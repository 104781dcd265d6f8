"""How an engine is set up. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from replayssm.checks import at_least
from replayssm.errors import OptionError
from replayssm.spec import DEFAULT_RING_LEN, SpecState, check_ring_len, check_window, ring_for

Mode = Literal["auto", "replay", "packed"]
Preempt = Literal["offload", "recompute"]
Spec = Literal["ngram", "mtp"]
PrefixPolicy = Literal["materialize", "truncate"]
PrefixStrategy = Literal["no_buffer", "extra_buffer"]
BUFFERS = 2  # of a request under "extra_buffer": one is filled while the other may be taken


@dataclass(frozen=True)
class EngineOptions:
    """Raises `OptionError` or `RingLengthError` with the value and the limit.

    Attributes:
        ring_len: L, decode steps between two writes of a state.
        state_dtype: of recurrent states; None as for `replayssm.enable`.
        mode: "replay", "packed", or "auto" for the faster one at each batch size.
        memory: bytes that weights, states, pages and work may take together; None takes `memory_fraction` of the GPU,
            on a CPU 4 GiB besides the weights.
        memory_fraction: of the GPU's memory.
        max_requests: that decode at once; None takes what the memory holds, at most 256 (on a CPU 32).
        chunk_tokens: tokens of prompts in one step, at least 2.
        page_size: tokens of a page of keys and values; None takes 64 on a GPU and 16 on a CPU.
        context: longest request in tokens; None takes the model's.
        preempt: what happens to the youngest request when pages run out: its state and pages move to host memory, or
            are dropped and computed again.
        graphs: CUDA graphs for decode steps; ignored on a CPU.
        fuse: compile the element-wise parts of the model; ignored on a CPU.
        paged: decode attention reads the pages in place, by flex attention; without it, and on a CPU, contexts are
            gathered first.
        overlap: read the tokens of a step while the next one runs; None does so on a GPU.
        prefix_cache: keep states and pages of what was computed, for prompts that begin the same way.
        prefix_interval: tokens between states that are kept of one request; a multiple of `page_size`.
        prefix_policy: what a request leaves when it ends: "materialize" the state of its full length, the ring folded
            on the way, or "truncate" that of its last fold, and as many tokens; conv windows are then kept twice.
        prefix_strategy: "no_buffer", a state finds its place in the cache when it is taken; "extra_buffer", each
            running request holds two of them in advance.
        prefix_share: of the memory besides weights and work, for kept states.
        spec: who drafts tokens that a step verifies together: "ngram", what followed the newest tokens when they stood
            in the text before; "mtp", the model's own head for it; None for nobody.
        spec_tokens: drafts of a step, at most.
        spec_state: how linear layers verify and keep a part of them, see `replayssm.engine.windows`.
        spec_adaptive: draft fewer tokens, or none, where that is measured to be faster.
        snapshot_interval: rows whose length becomes a multiple of it fold at that step; 0 never.
    """

    ring_len: int = DEFAULT_RING_LEN
    state_dtype: str | None = None
    mode: Mode = "auto"
    memory: int | None = None
    memory_fraction: float = 0.9
    max_requests: int | None = None
    chunk_tokens: int = 2048
    page_size: int | None = None
    context: int | None = None
    preempt: Preempt = "offload"
    graphs: bool = True
    fuse: bool = True
    paged: bool = True
    overlap: bool | None = None
    prefix_cache: bool = False
    prefix_interval: int = 64
    prefix_policy: PrefixPolicy = "materialize"
    prefix_strategy: PrefixStrategy = "no_buffer"
    prefix_share: float = 0.1
    spec: Spec | None = None
    spec_tokens: int = 4
    spec_state: SpecState = "ring"
    spec_adaptive: bool = True
    snapshot_interval: int = 0

    def __post_init__(self) -> None:
        check_ring_len(self.ring_len)
        for name, value, allowed in (
            ("mode", self.mode, ("auto", "replay", "packed")), ("preempt", self.preempt, ("offload", "recompute")),
            ("prefix_policy", self.prefix_policy, ("materialize", "truncate")),
            ("prefix_strategy", self.prefix_strategy, ("no_buffer", "extra_buffer")),
            ("spec", self.spec, (None, *get_args(Spec))), ("spec_state", self.spec_state, get_args(SpecState)),
        ):  # fmt: skip
            if value not in allowed:
                known = ", ".join(one for one in allowed if one is not None)
                raise OptionError(f"{name} {value!r} is unknown; use one of {known}")
        if not 0 < self.memory_fraction <= 1:
            raise OptionError(f"memory_fraction {self.memory_fraction} is outside (0, 1]")
        for name, number, least in (
            ("memory", self.memory, 1), ("max_requests", self.max_requests, 1), ("chunk_tokens", self.chunk_tokens, 2),
            ("page_size", self.page_size, 1), ("context", self.context, 2),
            ("snapshot_interval", self.snapshot_interval, 0), ("prefix_interval", self.prefix_interval, 1),
            ("spec_tokens", self.spec_tokens, 1),
        ):  # fmt: skip
            if number is not None:
                at_least(name, number, least)
        if self.spec is not None:
            self._check_spec()

    @property
    def window(self) -> int:
        """Tokens of a step that verifies as many drafts as are allowed."""
        return self.spec_tokens + 1

    def _check_spec(self) -> None:
        if self.spec_state == "ring" and self.mode == "packed":
            raise OptionError("spec_state 'ring' needs a ring, and mode 'packed' has none; use mode 'auto' or 'replay'")
        check_window(self.spec_state, self.spec_tokens, self.ring_len)
        if self.prefix_cache and self.prefix_policy == "truncate":
            raise OptionError(
                "prefix_policy 'truncate' keeps no conv window for the folds of verified drafts; use 'materialize', or "
                "no spec"
            )


def with_ring(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `EngineOptions`; where windows go to a ring whose length nobody names, with one that suits them."""
    drafts = fields.get("spec_tokens", EngineOptions.spec_tokens)
    on_ring = fields.get("spec") is not None and fields.get("spec_state", EngineOptions.spec_state) == "ring"
    if not on_ring or "ring_len" in fields:
        return dict(fields)
    return {**fields, "ring_len": ring_for(drafts + 1)}
