"""Exact scores on the task of `task`, under each way to decode: a stand-in for benchmarks like GSM8K.

Greedy decoding, answers compared as numbers. All settings get the same problems, so that a difference of two scores is
that of the problems which one solves and the other does not, and those are counted too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from replayssm.errors import PromptError
from replayssm.models.loading import LoadedModel
from replayssm.study.setting import BASELINE, Setting
from replayssm.study.task import Problem, is_right
from replayssm.study.text import using

BATCH = 64
SPARE = 8  # tokens that a completion may be longer than the solution
SETTINGS = [
    Setting("stock"),
    *(Setting(route, dtype) for dtype in ("float32", "float16", "bfloat16") for route in ("packed", "replay")),
]
Z = 1.959964  # of a two-sided 95 % interval


def measure(
    loaded: LoadedModel, problems: list[Problem], settings: list[Setting], tick: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """A row for each setting: right of count, accuracy, its 95 % interval low … high, and a comparison with packed
    decode with an fp32 state, problem by problem: lost and gained, those that only it or only this setting solves, and
    changed, the completions that differ."""
    baseline = solve(loaded, problems, BASELINE)
    solved = _solved(problems, baseline)
    rows = []
    for setting in settings:
        wrote = baseline if setting == BASELINE else solve(loaded, problems, setting)
        mine = _solved(problems, wrote)
        right, count = sum(mine), len(problems)
        low, high = interval(right, count)
        scores = dict(right=right, count=count, accuracy=right / count, low=low, high=high)
        pairs = list(zip(solved, mine, strict=True))
        changed = sum(one != other for one, other in zip(wrote, baseline, strict=True))
        paired = dict(lost=pairs.count((True, False)), gained=pairs.count((False, True)), changed=changed)
        rows.append(setting.as_row() | scores | paired)
        tick()
    return rows


def _solved(problems: list[Problem], wrote: list[str]) -> list[bool]:
    return [is_right(problem, text) for problem, text in zip(problems, wrote, strict=True)]


@torch.no_grad()
def solve(loaded: LoadedModel, problems: list[Problem], setting: Setting) -> list[str]:
    """What the model writes after each prompt, up to its end-of-text token or `SPARE` tokens beyond the solution."""
    tokenizer, eos = loaded.tokenizer, end_of_text(loaded)
    prompts = [[eos, *tokenizer(problem.prompt).input_ids] for problem in problems]
    limits = [len(tokenizer(problem.solution).input_ids) + SPARE for problem in problems]
    order = sorted(range(len(problems)), key=lambda i: limits[i])  # so that the rows of a batch end together
    wrote = [""] * len(problems)
    for begin in range(0, len(order), BATCH):
        part = order[begin : begin + BATCH]
        width = max(len(prompts[i]) for i in part)
        padding = [width - len(prompts[i]) for i in part]
        rows = zip(part, padding, strict=True)
        ids = torch.tensor([[eos] * pad + prompts[i] for i, pad in rows], device=loaded.model.device)
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long().to(ids.device)
        with using(loaded, setting):
            generate: Any = loaded.model.generate
            out = generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(limits[i] for i in part),
                eos_token_id=eos,
                pad_token_id=eos,
            )
        for i, row in zip(part, out[:, width:].tolist(), strict=True):
            end = row.index(eos) if eos in row else len(row)
            wrote[i] = str(tokenizer.decode(row[: min(end, limits[i])]))
    return wrote


def end_of_text(loaded: LoadedModel) -> int:
    """The token that ends a document, and with which a text begins in training."""
    eos = loaded.model.generation_config.eos_token_id
    eos = loaded.tokenizer.eos_token_id if eos is None else eos
    if not isinstance(eos, int):
        raise PromptError(
            f"end-of-text token {eos!r} of the model is not one token id; the task needs it to end a text"
        )
    return eos


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share: unlike right/count ± z·σ, it stays within 0 … 1 and is not a point at the ends."""
    share, z2 = right / count, Z * Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)
