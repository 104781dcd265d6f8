"""Errors of packed and replay decode against fp64 over thousands of steps of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replayssm import ops
from replayssm.study import rounding
from replayssm.study.layer import TIME_CONSTANTS, Layer
from replayssm.study.setting import Setting


def drift(layer: Layer, settings: list[Setting], tick: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Rows of `Layer.errors`, each with its setting: state as a flush at that step would leave it, and outputs."""
    rows = []
    for setting in settings:
        rows += [setting.as_row() | row for row in layer.errors(*run(layer, setting))]
        tick()
    return rows


def run(layer: Layer, setting: Setting) -> tuple[Tensor, dict[int, Tensor]]:
    """Outputs [T, B, HV, V] in fp32 and the flushed state at each mark, in the state's dtype.

    A mark does not disturb the run: its state is materialized beside the pool.
    """
    spec, rows, device = layer.spec, layer.rows, layer.device
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    state = layer.empty_state(rows, setting.state_dtype)
    out = torch.empty(layer.steps, rows, 1, spec.num_v_heads, spec.head_v_dim, device=device)
    states: dict[int, Tensor] = {}
    exact = setting.operands == "exact"
    replay = ops.fused_recurrent_linear_replayssm_decode if exact else rounding.op(setting.operands)
    d, k, g = (
        torch.full(array.shape, float("nan"), dtype=getattr(torch, array.dtype), device=device)
        for array in spec.ring_arrays(setting.ring_len, rows, "float32")
    )
    cursor = torch.zeros(rows, dtype=torch.int32, device=device)
    for t, token in enumerate(zip(*layer.tokens, strict=True)):
        weights = (*layer.gates, None)
        if setting.route == "packed":
            ops.fused_recurrent_linear_packed_decode(*token, *weights, state, out[t], slots, is_kda=spec.is_kda)
        else:
            pos = ops.gather_cursors(cursor, slots)
            replay(*token, *weights, state, d, k, g, out[t], slots, pos, is_kda=spec.is_kda)
            ops.advance_cursors(cursor, slots, setting.ring_len)
        if t + 1 in layer.marks:
            states[t + 1] = state.clone()
            if setting.route == "replay":
                pos = ops.gather_cursors(cursor, slots)
                ops.materialize(state, d, k, g, slots, pos, states[t + 1], slots)
    return out[:, :, 0], states


def forgetting(layer: Layer) -> list[dict[str, Any]]:
    """How an error made at step 0 fades: the difference of two fp64 runs that start apart, relative to the start.

    The recurrence is linear in the state, so the size of the error does not matter.
    """
    gen = torch.Generator().manual_seed(9)
    start = torch.randn(layer.spec.state_array(layer.rows).shape, generator=gen, dtype=torch.float64)
    _, moved = layer.follow(start)
    _, still = layer.truth
    return [
        dict(
            kind=layer.kind,
            decay=decay,
            steps=mark,
            left=float((moved[mark] - still[mark])[at].norm() / start[at].norm()),
        )
        for decay in TIME_CONSTANTS
        for at in (layer.rows_of(decay),)
        for mark in layer.marks
    ]
