"""Are two runs the same, and if not, is the first difference more than the model's own numerical noise?

Two exact implementations sum in different orders, so logits differ in their last digits, and where two tokens are
equally likely to that precision, either may be taken. Everything after such a point differs rightly. So only the first
difference counts: the inputs were equal up to there, and the logits must still agree within a limit. The run's own
logits must give its token, too, or it was not drawn from them.

The limit is 8·max(noise, (ε_model + ε_state)·max|logit|). The noise is measured on the spot: stock transformers
computes the same logits once more in a single forward over the whole text instead of token by token. ε is the spacing
of the dtype at 1 (2^-23 for float32); for a 16-bit state it is the larger term by far.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from replayssm.cli.decoding import Prompt, Route, Run, state_dtype
from replayssm.cli.routes import last_logits
from replayssm.cli.stock import draw
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.models.enable import disable
from replayssm.models.loading import LoadedModel

SAFETY = 8


@dataclass(frozen=True)
class Verdict:
    """Comparison of a run with `reference`. The numbers are None when all tokens are equal.

    `gap` is how far the run's own logits put its token above the other one, `delta` the largest difference between the
    two runs' logits there, `limit` what `delta` may be. `drawn` is what the sampler takes by the run's own logits.
    """

    reference: Route
    status: Literal["equal", "near-tie", "different"]
    tokens: int
    position: int | None = None
    got: int | None = None
    expected: int | None = None
    gap: float | None = None
    delta: float | None = None
    limit: float | None = None
    drawn: int | None = None

    @property
    def ok(self) -> bool:
        """Equal, or different by no more than noise explains."""
        return self.status != "different"

    def as_json(self) -> dict[str, Any]:
        """All fields and `ok`."""
        return {"ok": self.ok, **{name: value for name, value in asdict(self).items() if name != "reference"}}

    def describe(self, decoded: tuple[str, str] = ("", "")) -> str:
        """One line for a person; `decoded` are the two tokens as text."""
        if self.status == "equal":
            return f"OK, all {self.tokens} tokens equal"
        if self.gap is None:
            return f"DIFFERENT; one of the two ends after {self.position} equal tokens"
        where = f"first difference at token {self.position}: {decoded[0]!r} instead of {decoded[1]!r}"
        numbers = f"logit gap {self.gap:.2g}, logits differ by {self.delta:.2g}, limit {self.limit:.2g}"
        if self.drawn != self.got:
            numbers += f", but its own logits give token {self.drawn}, not {self.got}"
        return f"{'OK, near-tie' if self.ok else 'DIFFERENT'}; {where}; {numbers}"


def first_difference(got: list[int], expected: list[int]) -> int | None:
    """Index of the first differing token; a missing token differs too. None when equal."""
    for i, (x, y) in enumerate(zip(got, expected, strict=False)):
        if x != y:
            return i
    return None if len(got) == len(expected) else min(len(got), len(expected))


def compare(
    loaded: LoadedModel,
    prompt: Prompt,
    options: EngineOptions,
    params: SamplingParams,
    got: tuple[Route, Run],
    expected: tuple[Route, Run],
) -> Verdict:
    """Judge run `got` by run `expected`; decodes both again up to a first difference, if there is one."""
    (route, run), (reference, other) = got, expected
    at = first_difference(run.tokens, other.tokens)
    if at is None:
        return Verdict(reference, "equal", len(run.tokens))
    if at >= min(len(run.tokens), len(other.tokens)):  # one run is a prefix of the other: no end token, nothing to tie
        return Verdict(reference, "different", at, at)
    x, y, before = run.tokens[at], other.tokens[at], run.tokens[:at]
    raw = last_logits(loaded, prompt, route, options, params, at, run.drafts)
    drawn = draw(raw, prompt.tokens, before, params)
    mine = raw.float().cpu()
    theirs = last_logits(loaded, prompt, reference, options, params, at).float().cpu()
    delta = float((mine - theirs).abs().max())
    limit = _limit(loaded, prompt, options, params, before, theirs)
    status: Literal["near-tie", "different"] = "near-tie" if delta <= limit and drawn == x else "different"
    return Verdict(reference, status, len(run.tokens), at, x, y, float(mine[x] - mine[y]), delta, limit, drawn)


def _limit(
    loaded: LoadedModel,
    prompt: Prompt,
    options: EngineOptions,
    params: SamplingParams,
    prefix: list[int],
    logits: torch.Tensor,
) -> float:
    disable(loaded.model)
    tail = torch.tensor([prefix], dtype=prompt.ids.dtype, device=prompt.ids.device)
    with torch.no_grad():
        whole = loaded.model(torch.cat([prompt.ids, tail], dim=1), use_cache=False).logits[0, -1].float().cpu()
    stepwise = last_logits(loaded, prompt, "stock", options, params, len(prefix)).float().cpu()
    noise = float((whole - stepwise).abs().max())
    eps = torch.finfo(loaded.model.dtype).eps + torch.finfo(getattr(torch, state_dtype(loaded, options).name)).eps
    return SAFETY * max(noise, eps * float(logits.abs().max()))
