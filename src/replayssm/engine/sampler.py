"""From logits to tokens for a batch of requests, each with its own parameters.

A row's token is a function of its logits, parameters, seed and position alone: the noise of a token is a hash of
(seed, position, token), so neither the other rows of a batch nor their order can change it. Nothing here waits for the
device; what is costly (penalties, a sort of the vocabulary) runs only when the host knows that a row asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.engine.params import SamplingParams
from replayssm.errors import ShapeError
from replayssm.state import upload

NEVER = float("-inf")
# Multipliers of the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), as signed 64-bit numbers.
_MIX = (-4658895280553007687, -7723592293110705685)
_STEP = -7046029254386353131  # 2^64 / golden ratio


class Sampled(NamedTuple):
    """tokens [B] int64; logprobs [B] of them, and the likeliest `top_tokens` [B, n] with their `top_logprobs` [B, n],
    None when no row asks for logprobs."""

    tokens: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


@dataclass
class Batch:
    """Parameters of B rows as tensors on the device; build it with `prepare` when the rows of a batch change.

    `seeds` are the rows' own, all set. `random`: a row is not greedy.
    """

    temperature: Tensor
    seeds: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    most_logprobs: int | None = None
    random: bool = False

    @property
    def penalised(self) -> bool:
        """Whether a row has a penalty, so that `sample` needs its history."""
        return any(x is not None for x in (self.repetition, self.presence, self.frequency))


class History(NamedTuple):
    """What rows have seen [B, vocabulary]: `prompt` whether the prompt has a token, `output` how often the output."""

    prompt: Tensor
    output: Tensor


def prepare(params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str = "cpu") -> Batch:
    """Tensors of B rows; a parameter that no row uses has none."""
    if len(params) != len(seeds):
        raise ShapeError(f"{len(params)} rows of parameters, but {len(seeds)} seeds")

    def column(name: str, unused: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
        values = [getattr(p, name) for p in params]
        return None if all(v == unused for v in values) else upload(values, dtype, device)

    asked = [p.logprobs for p in params if p.logprobs is not None]
    bias = None
    if entries := [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias.items()]:
        rows, tokens, values = zip(*entries, strict=True)
        bias = (
            upload(rows, torch.int64, device), upload(tokens, torch.int64, device),
            upload(values, torch.float32, device),
        )  # fmt: skip
    return Batch(
        upload([p.temperature for p in params], torch.float32, device), upload(list(seeds), torch.int64, device),
        column("top_k", 0, torch.int64), column("top_p", 1.0), column("min_p", 0.0), column("repetition_penalty", 1.0),
        column("presence_penalty", 0.0), column("frequency_penalty", 0.0), bias, max(asked) if asked else None,
        any(not p.greedy for p in params),
    )  # fmt: skip


def sample(
    logits: Tensor, batch: Batch, positions: Tensor, history: History | None = None, forbidden: Tensor | None = None
) -> Sampled:
    """One token for each row.

    Args:
        logits: [B, vocabulary], any float dtype; not changed.
        batch: the rows' parameters.
        positions: [B] int64, tokens in the output so far: with the seed it decides the noise.
        history: of each row, where `batch.penalised`.
        forbidden: [B, vocabulary] bool, tokens that cannot be taken now (an end before `min_tokens`, a grammar).
    """
    plain = batch.bias is None and not batch.penalised and forbidden is None
    if plain and not batch.random and batch.most_logprobs is None:
        return Sampled(logits.argmax(-1))
    raw = logits.float()
    x = raw
    if batch.bias is not None:
        rows, tokens, values = batch.bias
        x = x.index_put((rows, tokens), values, accumulate=True)
    if batch.penalised:
        if history is None:
            raise ShapeError("a row has a penalty, so the history of all rows is needed")
        x = _penalise(x, batch, history)
    if forbidden is not None:
        x = x.masked_fill(forbidden, NEVER)
    tokens = x.argmax(-1)
    if batch.random:
        # distances from the largest, which stays 0 however small the temperature is
        warm = (x - x.amax(-1, keepdim=True)) / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
        drawn = (filtered(warm, batch) + gumbel(batch.seeds, positions, x.shape[-1])).argmax(-1)
        tokens = torch.where(batch.temperature > 0, drawn, tokens)
    if batch.most_logprobs is None:
        return Sampled(tokens)
    every = raw.log_softmax(-1)
    top = every.topk(max(1, batch.most_logprobs), -1)
    return Sampled(tokens, every.gather(1, tokens[:, None])[:, 0], top.indices, top.values)


def filtered(x: Tensor, batch: Batch) -> Tensor:
    """Logits [B, vocabulary] at temperature 1 with what top-k, top-p and min-p rule out at -inf, in this order."""
    if batch.top_k is not None or batch.top_p is not None:
        ordered, index = x.sort(stable=True, dim=-1, descending=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if batch.top_k is not None:
            rank = torch.arange(x.shape[-1], device=x.device)
            limit = torch.where(batch.top_k > 0, batch.top_k, x.shape[-1])
            keep &= rank < limit[:, None]
        if batch.top_p is not None:
            chances = ordered.masked_fill(~keep, NEVER).softmax(-1)
            before = chances.cumsum(-1) - chances  # the mass before a token, so that the first is kept
            keep &= before < torch.where(batch.top_p < 1, batch.top_p, 2.0)[:, None]  # a sum may round up to 1
        x = x.masked_fill(~torch.empty_like(keep).scatter_(-1, index, keep), NEVER)
    if batch.min_p is not None:
        least = x.amax(-1, keepdim=True) + batch.min_p.log()[:, None]
        x = x.masked_fill(x < least, NEVER)
    return x


def gumbel(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Noise [B, size] whose argmax with logits added is a draw from their softmax (Gumbel 1954)."""
    stream = _hash(_hash(seeds) + positions * _STEP)
    bits = _hash(stream[:, None] + torch.arange(1, size + 1, device=seeds.device) * _STEP)
    uniform = _shifted(bits, 12).double() * 2.0**-52 + 2.0**-53  # in (0, 1), both ends left out
    return -(-uniform.log()).log().float()


def _hash(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the result depends on every bit of x. int64, wrapping around."""
    x = (x ^ _shifted(x, 30)) * _MIX[0]
    x = (x ^ _shifted(x, 27)) * _MIX[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Unsigned shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _penalise(x: Tensor, batch: Batch, history: History) -> Tensor:
    if batch.repetition is not None:
        by = torch.where(history.prompt | (history.output > 0), batch.repetition[:, None], 1.0)
        x = torch.where(x > 0, x / by, x * by)
    if batch.presence is not None:
        x = x - batch.presence[:, None] * (history.output > 0)
    if batch.frequency is not None:
        x = x - batch.frequency[:, None] * history.output
    return x
