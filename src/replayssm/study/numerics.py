"""The numerics study as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from replayssm.models.loading import LoadedModel
from replayssm.spec import Kind
from replayssm.study import claims, drift, text
from replayssm.study.layer import Layer
from replayssm.study.setting import drift_settings

KINDS: tuple[Kind, ...] = ("gdn", "kda")
Counter = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


def run(
    models: Sequence[tuple[str, LoadedModel]],
    held_out: str,
    steps: int,
    tokens: int,
    device: torch.device,
    counter: Counter,
) -> dict[str, Any]:
    """drift, forgetting: rows of one layer over `steps` steps. text: rows of each model, `tokens` a row of
    `text.ROWS` rows of `held_out`. claims: what they say together.

    `counter` shows progress: a name and how many ticks will come.
    """
    result: dict[str, Any] = dict(drift=[], forgetting=[], text={})
    settings = drift_settings()
    for kind in KINDS:
        layer = Layer(kind, steps, device)
        with counter(f"{kind}: drift of {len(settings)} settings over {steps} steps", len(settings)) as tick:
            result["drift"] += drift.drift(layer, settings, tick)
        result["forgetting"] += drift.forgetting(layer)
    for name, loaded in models:
        with counter(f"model {name}: {len(text.SETTINGS)} settings", len(text.SETTINGS)) as tick:
            result["text"][name] = text.measure(loaded, held_out, tokens, text.SETTINGS, tick)
    result["claims"] = claims.judge(result)
    return result
