"""Causal depthwise convolution, one token a row, on a pool of windows (torch backend)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.kernels.torch_rows import live_rows


def causal_conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ssm_state_indices: Tensor,
    activation: str | None,
    out: Tensor,
) -> None:
    """See `replayssm.ops.causal_conv_update`."""
    rows = live_rows(ssm_state_indices)
    x = rows.take(x)
    if rows.where is not None:
        out.zero_()  # `out` may be x itself, so x was taken before
    if rows.length == 0:
        return
    width = weight.shape[1]
    state = rows.gather(conv_state)
    size = state.shape[2]
    y = x * weight[:, -1].float()
    for i in range(width - 1):  # the taps, not the rows
        y.addcmul_(state[:, :, size - width + 1 + i].float(), weight[:, i].float())
    if bias is not None:
        y.add_(bias)
    if activation == "silu":
        y = F.silu(y, inplace=True)
    if size:
        window = torch.cat([state[:, :, 1:], x.unsqueeze(2).to(state.dtype)], 2)
        if rows.first is not None:
            state.copy_(window)  # `state` is a view of the pool
        else:
            conv_state.index_copy_(0, rows.slots, window)
    rows.put(out, y)
