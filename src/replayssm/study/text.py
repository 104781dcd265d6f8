"""What a setting costs a whole model: held-out bits per byte, and how far greedy and sampled text stray from fp32.

Everything is decoded one token at a time, since that is where a state is rounded; only the first tokens of a row go
through the model at once. Rows are decoded together, and no row ends early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from replayssm import ops
from replayssm.errors import PromptError
from replayssm.models.enable import disable, enable
from replayssm.models.loading import LoadedModel
from replayssm.study import rounding
from replayssm.study.setting import BASELINE, ROUNDED, Setting

ROWS = 8
PREFIX = 32  # tokens of a row that the model is given at once
SETTINGS = [
    Setting("stock"),
    *(Setting(route, dtype) for dtype in ("float32", "float16", "bfloat16") for route in ("packed", "replay")),
    *(Setting("replay", "bfloat16", length) for length in (1, 16, 64)),
    *(Setting("replay", operands=operands) for operands in ROUNDED),
]
TEMPERATURE = 0.8
REPLAY = "fused_recurrent_linear_replayssm_decode"  # the op for which other operands stand in
ORDER = 4  # of the n-grams whose repetition is counted


class Decoded(NamedTuple):
    """Of `steps` decode steps of R rows: tokens [R, T] and what the model thought, log-probabilities of them [R, T] and
    the likeliest tokens [R, T]."""

    tokens: Tensor
    log_probs: Tensor
    likeliest: Tensor


def measure(
    loaded: LoadedModel, text: str, steps: int, settings: list[Setting], tick: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """A row for each setting; `steps` tokens in each of `ROWS` rows of `text`.

    bits_per_byte      of the text, each row given its first `PREFIX` tokens
    top1               how often the likeliest next token is that of packed decode with an fp32 state, on the tokens of
                       its greedy text
    greedy_equal       share of the greedy text's tokens before a row's first difference from that baseline
    greedy_rows        rows that are equal to the end
    greedy_repeats, sampled_repeats
                       share of tokens that complete a 4-gram which their row held before, prompt included
    tokens             ROWS · steps, of each of these
    """
    ids = rows_of(loaded, text, steps)
    prompts = ids[:, :PREFIX]
    baseline = decode(loaded, prompts, steps, BASELINE)
    rows = []
    for setting in settings:
        read = decode(loaded, prompts, steps, setting, forced=ids[:, PREFIX:])
        greedy = baseline if setting == BASELINE else decode(loaded, prompts, steps, setting)
        again = greedy if greedy is baseline else decode(loaded, prompts, steps, setting, forced=baseline.tokens)
        sampled = decode(loaded, prompts, steps, setting, temperature=TEMPERATURE)
        same = (greedy.tokens == baseline.tokens).cumprod(1)
        rows.append(
            setting.as_row()
            | dict(
                bits_per_byte=-float(read.log_probs.sum()) / math.log(2) / _bytes(loaded, ids),
                top1=float((again.likeliest == baseline.likeliest).double().mean()),
                greedy_equal=float(same.double().mean()),
                greedy_rows=int(same[:, -1].sum()),
                greedy_repeats=repeats(torch.cat([prompts, greedy.tokens], 1), PREFIX),
                sampled_repeats=repeats(torch.cat([prompts, sampled.tokens], 1), PREFIX),
                tokens=greedy.tokens.numel(),
            )
        )
        tick()
    return rows


def rows_of(loaded: LoadedModel, text: str, steps: int) -> Tensor:
    """Token ids [ROWS, PREFIX + steps], evenly spread over `text`."""
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[0]
    length = PREFIX + steps
    if length > loaded.context_length:
        raise PromptError(f"{PREFIX} + {steps} tokens a row exceed the model's context of {loaded.context_length}")
    if len(ids) < ROWS * length:
        raise PromptError(
            f"the text has {len(ids)} tokens, {ROWS} rows of {length} need {ROWS * length}; ask for fewer steps"
        )
    starts = [i * (len(ids) - length) // (ROWS - 1) for i in range(ROWS)]
    return torch.stack([ids[s : s + length] for s in starts]).to(loaded.model.device)


@torch.no_grad()
def decode(
    loaded: LoadedModel,
    prompts: Tensor,
    steps: int,
    setting: Setting,
    forced: Tensor | None = None,
    temperature: float = 0.0,
) -> Decoded:
    """Greedy, sampled, or along the tokens `forced` [R, steps]. The noise of sampling is the same for every setting."""
    gen = torch.Generator().manual_seed(3)
    tokens, log_probs, likeliest = [], [], []
    with using(loaded, setting):
        last: Any = loaded.model(prompts, use_cache=True)
        for t in range(steps):
            logits = last.logits[:, -1].float()
            best = logits.argmax(-1)
            if forced is not None:
                token = forced[:, t]
            elif temperature:
                noise = -torch.empty(logits.shape).exponential_(generator=gen).log().to(logits.device)  # Gumbel
                token = (logits / temperature + noise).argmax(-1)
            else:
                token = best
            tokens.append(token)
            likeliest.append(best)
            log_probs.append(logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
            if t + 1 < steps:
                last = loaded.model(token[:, None], past_key_values=last.past_key_values, use_cache=True)
    return Decoded(*(torch.stack(x, 1) for x in (tokens, log_probs, likeliest)))


@contextmanager
def using(loaded: LoadedModel, setting: Setting) -> Iterator[None]:
    """The model decodes by `setting`."""
    if setting.route == "stock":
        disable(loaded.model)
        yield
        return
    rounded = setting.operands != "exact"
    with (
        enable(loaded.model, setting.ring_len, setting.state_dtype, mode=setting.route),
        mock.patch.object(ops, REPLAY, rounding.op(setting.operands)) if rounded else nullcontext(),
    ):
        yield


def repeats(tokens: Tensor, begin: int, order: int = ORDER) -> float:
    """Share of the tokens [R, begin:] that end an n-gram which stood earlier in the same row."""
    found = 0
    for row in tokens.tolist():
        seen: set[tuple[int, ...]] = set()
        for end in range(order, len(row) + 1):
            gram = tuple(row[end - order : end])
            found += end > begin and gram in seen
            seen.add(gram)
    return found / (tokens.shape[0] * (tokens.shape[1] - begin))


def _bytes(loaded: LoadedModel, ids: Tensor) -> int:
    """UTF-8 bytes that the tokens after the prefix add to the text."""
    decoded = loaded.tokenizer.batch_decode
    return sum(
        len(whole.encode()) - len(start.encode())
        for whole, start in zip(decoded(ids.tolist()), decoded(ids[:, :PREFIX].tolist()), strict=True)
    )
