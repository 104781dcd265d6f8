"""A request on its way through the engine, and what its caller gets."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from replayssm.engine.grammar import Matcher
from replayssm.engine.params import SamplingParams
from replayssm.state import HostState

Status = Literal["waiting", "running", "finished"]
Reason = Literal["stop", "length", "abort", "error"]
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: seeds of n outputs of one request lie far apart


class Logprob(NamedTuple):
    """Of one token of an output: its own, and the likeliest tokens with theirs, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Saved(NamedTuple):
    """A preempted request in host memory: state, content of its pages, and the tokens that are in both."""

    state: HostState
    pages: list[list[Tensor]]
    computed: int


@dataclass(eq=False)
class Request:
    """One output to be made. A prompt with n > 1 becomes n of them, the later ones made from the first.

    `tokens` are the prompt and what was fetched of the output; `length` counts tokens that are still on the device,
    too. `computed` of them are in the state and the pages. A request decodes when exactly one is not.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    index: int = 0
    parent: Request | None = None
    status: Status = "waiting"
    reason: Reason | None = None
    error: str | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)  # of the prefix cache, for its next states
    synced: int = 0  # pages that the device knows
    tokens: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    computed: int = 0
    saved: Saved | None = None
    limit: int = 0  # prompt and output together end here
    unforked: int = 0  # outputs of the same prompt that still wait for its state
    logprobs: list[Logprob] = field(default_factory=list)
    stream: Any = None  # TextStream, where a tokenizer is known
    matcher: Matcher | None = None  # where the output stands in its grammar
    cached_tokens: int = 0
    drafted: int = 0
    drafts_kept: int = 0
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = array("i", self.prompt)
        self.length = len(self.tokens)
        self.unforked = self.params.n - 1 if self.parent is None else 0

    @property
    def pending(self) -> int:
        """Tokens that are not in the state yet."""
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the next step of this request is a decode step: one token that continues a state."""
        return self.computed > 0 and self.pending == 1

    @property
    def full(self) -> bool:
        """Whether its last token is on the way already."""
        return self.length >= self.limit

    @property
    def generated(self) -> int:
        """Output tokens, those on the device included."""
        return self.length - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """Output tokens that were fetched."""
        return self.tokens[len(self.prompt) :].tolist()

    @property
    def outputs(self) -> int:
        """Outputs that its prompt has: what ends before it forks stays alone."""
        return 1 if self.unforked else self.params.n

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self.status == "finished"

    def fork(self, index: int) -> Request:
        """Another output of the same prompt, with a seed of its own."""
        seed = (self.seed + index * _GOLDEN) % 2**63
        params = replace(self.params, n=1)
        return Request(self.id, self.prompt, params, seed, index, self, arrived=self.arrived, limit=self.limit)

    def __repr__(self) -> str:
        return f"request {self.id}" + (f" output {self.index}" if self.index else "")


@dataclass(frozen=True)
class Completion:
    """One output of a prompt.

    Attributes:
        index: 0 … n-1.
        text: without special tokens and without the stop text.
        token_ids: all tokens, the one that ended it included.
        finish_reason: "stop" (end of text, stop token or stop text), "length" (max_tokens, or the context is full),
            "abort", "error".
        logprobs: of each token, empty unless asked for.
        error: what went wrong, with finish_reason "error".
        ttft: seconds from submission to the first token.
        seconds: from submission to the last token.
        drafted, drafts_kept: tokens that were guessed, and those of them that the model took.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Reason | None
    logprobs: tuple[Logprob, ...] = ()
    error: str | None = None
    ttft: float | None = None
    seconds: float | None = None
    drafted: int = 0
    drafts_kept: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its outputs. `text`, `token_ids` and `finish_reason` are those of the first.

    `cached_tokens` of the prompt came from the prefix cache; `preemptions` counts how often it had to make room;
    `drafted` and `drafts_kept` are those of all outputs.
    """

    id: int
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def text(self) -> str:
        """Of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> Reason | None:
        """Of the first output."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[Logprob, ...]:
        """Of the first output."""
        return self.outputs[0].logprobs

    @property
    def drafted(self) -> int:
        """Tokens that were guessed."""
        return sum(one.drafted for one in self.outputs)

    @property
    def drafts_kept(self) -> int:
        """Guesses that the model took."""
        return sum(one.drafts_kept for one in self.outputs)


def completion_of(request: Request) -> Completion:
    """What there is of an output so far."""
    text = request.stream.text if request.stream is not None else ""
    first, last = request.first_token, request.last_token
    return Completion(
        request.index, text, tuple(request.output), request.reason, tuple(request.logprobs), request.error,
        None if first is None else first - request.arrived, None if last is None else last - request.arrived,
        request.drafted, request.drafts_kept,
    )  # fmt: skip


def output_of(requests: Iterable[Request]) -> RequestOutput:
    """What there is of the outputs of one prompt so far."""
    each = sorted(requests, key=lambda one: one.index)
    root = each[0].parent or each[0]
    preemptions = sum(one.preemptions for one in each)
    return RequestOutput(root.id, tuple(root.prompt), tuple(map(completion_of, each)), root.cached_tokens, preemptions)
