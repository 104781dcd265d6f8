"""Do two engines say the same, up to what the model's own rounding explains?

A few requests of a batch run twice, by the mode in question and by packed decode, at the batch size that is timed. Up
to a first differing token their inputs are equal, so the log-probabilities must agree; at it the token must be nearly
as likely to packed decode as its own. Both limits are 4 · noise. The noise is that of the model: one forward over the
whole text, without an engine, against the same log-probabilities of packed decode, token by token; at least the
rounding of the largest logit. Packed decode itself is held against that forward alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from replayssm.engine.core import Engine
from replayssm.engine.params import MAX_LOGPROBS, SamplingParams
from replayssm.engine.request import Logprob, Request

SAFETY = 4
MOST_NOISE = 0.5  # median, in standard deviations of the logits: far above rounding, far below a wrong model
MOST_LIMIT = 2.0  # likewise, of any difference
PACKED, FORWARD = "packed decode", "a forward over the whole text"
TAIL = 64  # tokens of a request that the whole forward looks at


class Transcript(NamedTuple):
    """A prompt, and each token of the answer with its log-probability and the likeliest ones."""

    prompt: list[int]
    logprobs: list[Logprob]

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        return [one.token for one in self.logprobs]


@dataclass(frozen=True)
class Reference:
    """What packed decode said. `noise` is the largest, `usual` the median difference to the whole forward."""

    transcripts: list[Transcript]
    noise: float
    usual: float
    spread: float
    rounding: float

    @property
    def limit(self) -> float:
        """Of a difference that may still be rounding."""
        return min(SAFETY * max(self.noise, self.rounding), MOST_LIMIT * self.spread)


@dataclass(frozen=True)
class Verdict:
    """Of one batch.

    `status` is "equal", "near-tie", "different", or "reference" for packed decode itself; `against` says what it was
    held against. `request` and `position` are those of the first differing token, None where there is none; `gap` is
    how much likelier packed decode finds its own token there, at least. `delta` is the largest difference of
    log-probabilities up to there; `noise` that of the whole forward, `usual` its median, `spread` the standard
    deviation of the logits.
    """

    status: str
    ok: bool
    against: str
    requests: int
    tokens: int
    delta: float
    limit: float
    noise: float
    usual: float
    spread: float
    request: int | None = None
    position: int | None = None
    gap: float | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    def __str__(self) -> str:
        if self.against == FORWARD:
            return f"{PACKED} and {FORWARD} differ by {self.usual:.2g} (median), limit {MOST_NOISE * self.spread:.2g}"
        where = ""
        if self.position is not None:
            where = f"first difference in request {self.request} at token {self.position}, gap {self.gap:.2g}; "
        return f"{where}log-probabilities differ by {self.delta:.2g}, limit {self.limit:.2g}"


def checked(batch: int) -> list[int]:
    """Up to four requests of a batch."""
    return sorted({0, min(1, batch - 1), batch // 2, batch - 1})


def sampling(batch: int, tokens: int) -> list[SamplingParams]:
    """Greedy for all; the checked requests tell their log-probabilities."""
    rows = checked(batch)
    plain = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    told = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=MAX_LOGPROBS)
    return [told if row in rows else plain for row in range(batch)]


def transcripts(made: Sequence[Request]) -> list[Transcript]:
    """Of the checked requests of a batch that has run."""
    return [Transcript(made[row].prompt, made[row].logprobs) for row in checked(len(made))]


def reference(engine: Engine, said: list[Transcript]) -> Reference:
    """Hold what a packed engine said against the model's own forward."""
    differences: list[float] = []
    spread = largest = 0.0
    model = engine.runner.model
    for prompt, answer in said:
        head = answer[:TAIL]
        tokens = [one.token for one in head]
        logits = whole(model, prompt + tokens[:-1], len(head))
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        differences += [abs(a - b.logprob) for a, b in zip(logprobs.tolist(), head, strict=True)]
        spread = max(spread, float(logits.std(-1).mean()))
        largest = max(largest, float(logits.abs().max()))
    rounding = torch.finfo(model.dtype).eps / 2 * largest
    return Reference(said, max_or_nan(differences), median(differences), spread, rounding)


@torch.inference_mode()
def whole(model: Any, tokens: list[int], keep: int) -> torch.Tensor:
    """fp32 logits [keep, vocabulary] of the last `keep` positions, in one forward without a cache."""
    ids = torch.tensor([tokens], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0]
    return logits.float()


def judge_packed(reference: Reference) -> Verdict:
    """Packed decode against the whole forward."""
    ok = reference.noise < float("inf") and reference.usual <= MOST_NOISE * reference.spread
    status = "reference" if ok else "different"
    return _verdict(status, ok, reference, reference.transcripts, reference.noise, against=FORWARD)


def judge(said: list[Transcript], reference: Reference) -> Verdict:
    """Another mode against packed decode; NaN is never right."""
    deltas: list[float] = []
    first: tuple[int, int, float, bool] | None = None
    for index, (mine, theirs) in enumerate(zip(said, reference.transcripts, strict=True)):
        pairs = list(zip(mine.logprobs, theirs.logprobs, strict=True))
        at = next((i for i, (a, b) in enumerate(pairs) if a.token != b.token), None)
        deltas += [abs(a.logprob - b.logprob) for a, b in pairs[:at]]
        if at is None:
            continue
        a, b = pairs[at]
        mine_top, their_top = dict(a.top), dict(b.top)
        if b.token in mine_top:
            deltas.append(abs(mine_top[b.token] - b.logprob))
        listed = a.token in their_top
        gap = b.logprob - (their_top[a.token] if listed else min(their_top.values()))
        if first is None or (at, -gap) < (first[1], -first[2]):
            first = index, at, gap, listed
        if not (listed and gap <= reference.limit):  # one wrong request is enough, wherever it is
            first = index, at, gap, listed
            break
    delta = max_or_nan(deltas)
    fits = delta <= reference.limit
    if first is None:
        return _verdict("equal" if fits else "different", fits, reference, said, delta)
    index, at, gap, listed = first
    ok = fits and listed and gap <= reference.limit
    return _verdict("near-tie" if ok else "different", ok, reference, said, delta, index, at, gap)


def _verdict(
    status: str,
    ok: bool,
    reference: Reference,
    said: list[Transcript],
    delta: float,
    index: int | None = None,
    position: int | None = None,
    gap: float | None = None,
    against: str = PACKED,
) -> Verdict:
    tokens = len(said[0].logprobs)
    noise = (reference.noise, reference.usual, reference.spread)
    return Verdict(status, ok, against, len(said), tokens, delta, reference.limit, *noise, index, position, gap)


def max_or_nan(values: Sequence[float]) -> float:
    """The largest; NaN if one is, 0 of none."""
    if any(value != value for value in values):
        return float("nan")
    return max(values, default=0.0)
