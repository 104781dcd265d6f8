"""Exact scores on the task of `task`, under each way to decode: a stand-in for benchmarks like GSM8K.

Greedy decoding, answers compared as numbers. All settings get the same problems, so that a difference of two scores is
that of the answers which changed, and those are counted too.
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
SETTINGS = [
    Setting("stock"),
    *(Setting(route, dtype) for dtype in ("float32", "float16", "bfloat16") for route in ("packed", "replay")),
]
Z = 1.959964  # of a two-sided 95 % interval


def measure(
    loaded: LoadedModel, problems: list[Problem], settings: list[Setting], tick: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """A row for each setting: right of count, accuracy, its 95 % interval low … high, and changed: completions that
    are not those of packed decode with an fp32 state."""
    baseline = solve(loaded, problems, BASELINE)
    rows = []
    for setting in settings:
        wrote = baseline if setting == BASELINE else solve(loaded, problems, setting)
        right = sum(is_right(problem, text) for problem, text in zip(problems, wrote, strict=True))
        low, high = interval(right, len(problems))
        changed = sum(mine != theirs for mine, theirs in zip(wrote, baseline, strict=True))
        scores = dict(right=right, count=len(problems), accuracy=right / len(problems), low=low, high=high)
        rows.append(setting.as_row() | scores | dict(changed=changed))
        tick()
    return rows


@torch.no_grad()
def solve(loaded: LoadedModel, problems: list[Problem], setting: Setting) -> list[str]:
    """What the model writes after each prompt, up to its end-of-text token."""
    tokenizer, eos = loaded.tokenizer, end_of_text(loaded)
    longest = max(len(tokenizer(problem.solution).input_ids) for problem in problems)
    wrote: list[str] = []
    for begin in range(0, len(problems), BATCH):
        part = problems[begin : begin + BATCH]
        prompts = [[eos, *tokenizer(problem.prompt).input_ids] for problem in part]
        width = max(map(len, prompts))
        ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts], device=loaded.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=loaded.model.device)
        with using(loaded, setting):
            generate: Any = loaded.model.generate
            out = generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest + 1,
                eos_token_id=eos,
                pad_token_id=eos,
            )
        for row in out[:, width:].tolist():
            end = row.index(eos) if eos in row else len(row)
            wrote.append(str(tokenizer.decode(row[:end])))
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
