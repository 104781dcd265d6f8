"""Causal depthwise convolution, one token a row or several."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ssm_state_indices: Tensor,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Arguments as the op of the same name, without `out`. Returns y [B, C] in `dtype` and the new windows.

    y_c = activation(Σ_i weight[c, i]·u_{c,i} + bias_c), u the last W-1 columns of the window and then x.
    """
    windows, y = conv_state.clone(), x.new_zeros(x.shape, dtype=dtype)
    width = weight.shape[1]
    for row, slot in enumerate(ssm_state_indices.tolist()):
        if slot < 0:
            continue
        u = torch.cat([conv_state[slot].to(dtype), x[row, :, None].to(dtype)], 1)
        total = (u[:, u.shape[1] - width :] * weight.to(dtype)).sum(1)
        if bias is not None:
            total = total + bias.to(dtype)
        y[row] = total * torch.sigmoid(total) if activation == "silu" else total
        windows[slot] = u[:, 1:].to(windows.dtype)
    return y, windows


def causal_conv_verify(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ssm_state_indices: Tensor,
    lengths: Tensor,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """T tokens a row, x [B, T, C], one after the other on a window that is thrown away. Returns y [B, T, C]."""
    y = x.new_zeros(x.shape, dtype=dtype)
    for row, (slot, length) in enumerate(zip(ssm_state_indices.tolist(), lengths.tolist(), strict=True)):
        mine = slice(row, row + 1)
        window = conv_state[slot : slot + 1] if slot >= 0 else conv_state[:0]
        for t in range(length if slot >= 0 else 0):
            first = torch.zeros(1, dtype=torch.int32)
            y[mine, t], window = causal_conv_update(x[mine, t], window, weight, bias, first, activation, dtype)
    return y


def commit_conv(conv_state: Tensor, window: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> Tensor:
    """The windows with the first `accepted` inputs of each row pushed in; window [B, T, C], one layer."""
    windows = conv_state.clone()
    for row, (slot, count) in enumerate(zip(ssm_state_indices.tolist(), accepted.tolist(), strict=True)):
        if slot >= 0:
            seen = torch.cat([conv_state[slot], window[row, :count].mT.to(windows.dtype)], 1)
            windows[slot] = seen[:, count:]
    return windows
