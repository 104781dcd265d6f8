"""What the linear layers of a model receive while it decodes: the inputs that `replayssm check` runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GenerationConfig

from replayssm import ops
from replayssm.cli.decoding import Prompt
from replayssm.cli.stock import generate
from replayssm.models.enable import enable
from replayssm.models.loading import LoadedModel
from replayssm.spec import LayerSpec


@dataclass
class LayerRecord:
    """T decode steps of one layer, one row: its inputs after the conv, its gate parameters, its state before them.

    `mixed_qkv` [T, C], `a` [T, HV] or [T, HV, K], `b` [T, HV]; `state` [1, HV, V, K] fp32; `options` is what says KDA,
    bounded gate and the scale of beta.
    """

    index: int
    spec: LayerSpec
    A_log: Tensor
    dt_bias: Tensor
    scale: float
    state: Tensor
    options: dict[str, Any]
    steps: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @property
    def mixed_qkv(self) -> Tensor:
        """[T, C]."""
        return torch.cat([step[0] for step in self.steps])

    @property
    def a(self) -> Tensor:
        """[T, HV] or [T, HV, K]."""
        return torch.cat([step[1] for step in self.steps])

    @property
    def b(self) -> Tensor:
        """[T, HV]."""
        return torch.cat([step[2] for step in self.steps])


def record(
    loaded: LoadedModel, prompt: Prompt, tokens: int, on_token: Callable[[], None] | None = None
) -> list[LayerRecord]:
    """Decode `tokens` steps greedily after the prompt and keep the inputs of every linear layer.

    The model decodes by the packed op with an fp32 state. The record does not depend on what is checked later: each
    check starts from the recorded state and feeds the recorded inputs, so that errors of one layer do not reach the
    next, and all variants see the same numbers.
    """
    types = loaded.config.get_text_config(decoder=True).layer_types
    indices = [i for i, kind in enumerate(types) if kind == "linear_attention"]
    records: list[LayerRecord] = []
    original = ops.fused_recurrent_linear_packed_decode
    calls = 0

    def listen(
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        initial_state: Tensor,
        out: Tensor,
        ssm_state_indices: Tensor,
        **options: Any,
    ) -> Tensor:
        nonlocal calls
        layer = calls % len(indices)
        calls += 1
        if layer == len(records):
            spec = loaded.specs[layer]
            state = initial_state.detach().clone()
            records.append(LayerRecord(indices[layer], spec, A_log.detach(), dt_bias.detach(), scale, state, options))
        records[layer].steps.append((mixed_qkv.detach().clone(), a.detach().clone(), b.detach().clone()))
        if layer == len(indices) - 1 and on_token is not None:
            on_token()
        return original(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, **options)

    with (
        enable(loaded.model, 1, "float32", mode="packed"),
        mock.patch.object(ops, "fused_recurrent_linear_packed_decode", listen),
    ):
        pad = loaded.model.generation_config.pad_token_id
        length = tokens + 1  # the first token comes out of the prompt's forward
        config = GenerationConfig(
            do_sample=False, max_new_tokens=length, min_new_tokens=length, pad_token_id=0 if pad is None else pad
        )
        generate(loaded)(prompt.ids, attention_mask=torch.ones_like(prompt.ids), generation_config=config)
    return records
