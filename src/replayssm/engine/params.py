"""What a request asks of the sampler, checked when it is made. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from replayssm.engine.grammar import Grammar
from replayssm.errors import OptionError

MAX_LOGPROBS = 20
MAX_STOPS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Raises `OptionError` with the value and the limit.

    The order of work is that of the fields: bias, penalties, temperature, then the filters; each filter looks at what
    the one before it left. Logprobs are of the model's own logits, before any of it.

    Attributes:
        temperature: 0 is greedy; the filters then change nothing.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities together reach p; the one that reaches it is kept.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        repetition_penalty: > 0; logits of tokens in the prompt or the output are divided by it where positive, else
            multiplied (Keskar et al., arXiv:1909.05858).
        presence_penalty: taken off the logit of each token in the output.
        frequency_penalty: taken off the logit for each time that a token is in the output.
        logit_bias: token id -> number added to its logit; -inf forbids the token.
        seed: makes the tokens a function of the request alone; None draws one when the request is submitted.
        logprobs: of the chosen token and of this many likeliest ones; None for none.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output, besides the model's own end; they are not part of the text.
        ignore_eos: the model's own end ends nothing.
        max_tokens: of the output.
        min_tokens: the output cannot end by a token before this many.
        n: outputs for one prompt.
        grammar: what the output must be, see `Grammar`; it then ends when the grammar does.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 256
    min_tokens: int = 0
    n: int = 1
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, low, high, closed in (
            ("temperature", 0.0, 100.0, True), ("top_p", 0.0, 1.0, False), ("min_p", 0.0, 1.0, True),
            ("repetition_penalty", 0.0, 100.0, False), ("presence_penalty", -2.0, 2.0, True),
            ("frequency_penalty", -2.0, 2.0, True),
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high or (value == low and not closed):
                raise OptionError(f"{name} {value!r} is outside {'[' if closed else '('}{low:g}, {high:g}]")
        counts: tuple[tuple[str, int, int | None], ...] = (
            ("top_k", 0, None), ("max_tokens", 1, None), ("min_tokens", 0, self.max_tokens), ("n", 1, 128),
            ("seed", 0, 2**63 - 1), ("logprobs", 0, MAX_LOGPROBS),
        )  # fmt: skip
        for name, least, most in counts:
            _check_count(name, getattr(self, name), least, most, optional=name in ("seed", "logprobs"))
        for token, bias in self.logit_bias.items():
            _check_count("logit_bias token", token, 0, None)
            if not _is_number(bias, infinite=True) or bias > 100 or (bias < -100 and bias != -math.inf):
                raise OptionError(f"logit_bias {bias!r} of token {token} is outside [-100, 100] and not -inf")
        if len(self.stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in self.stop):
            raise OptionError(f"stop {list(self.stop)!r} must be at most {MAX_STOPS} texts, none of them empty")
        for token in self.stop_token_ids:
            _check_count("stop_token_ids", token, 0, None)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise OptionError(f"grammar {self.grammar!r} is no Grammar")
        if self.grammar is not None and self.min_tokens:
            raise OptionError(f"min_tokens {self.min_tokens} contradicts a grammar, which says when the output may end")
        if self.n > 1 and self.temperature == 0:
            raise OptionError(f"n = {self.n} greedy outputs would be equal; set temperature above 0 or n to 1")

    @property
    def greedy(self) -> bool:
        """No randomness."""
        return self.temperature == 0

    def check_vocabulary(self, size: int) -> None:
        """Raise `OptionError` when a token id does not exist in a vocabulary of `size`."""
        named = [("logit_bias", t) for t in self.logit_bias] + [("stop_token_ids", t) for t in self.stop_token_ids]
        for name, token in named:
            if token >= size:
                raise OptionError(f"{name} names token {token}, but the vocabulary has {size} tokens, 0…{size - 1}")
        if self.top_k > size:
            raise OptionError(f"top_k {self.top_k} exceeds the vocabulary of {size} tokens; 0 keeps all")


def _is_number(value: object, infinite: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return not math.isnan(value) and (infinite or math.isfinite(value))


def _check_count(name: str, value: object, low: int, high: int | None, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} {value!r} is no whole number")
    if value < low or (high is not None and value > high):
        raise OptionError(f"{name} {value} is outside {low}…{'' if high is None else high}")
