"""Causal depthwise convolution, one token a row."""

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
