"""What follows a window on the torch backend: cursors, conv windows and snapshots move on by what was kept.

Device-only: no readback, no boolean indexing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.kernels.torch_rows import live_rows


def commit_cursors(
    cursor: Tensor, ssm_state_indices: Tensor, ring_len: int, lengths: Tensor, accepted: Tensor,
    force_flush: Tensor | None,
) -> None:  # fmt: skip
    """See `replayssm.ops.commit_cursors`."""
    slots = ssm_state_indices.clamp_min(0)
    pos = cursor.index_select(0, slots)
    flushed = pos + lengths >= ring_len
    if force_flush is not None:
        flushed |= force_flush != 0
    step = (pos.masked_fill(flushed, 0) + accepted - pos).masked_fill_(ssm_state_indices < 0, 0)
    # Adding, not storing: padding rows add 0 to slot 0 and so cannot race with the row that owns it.
    cursor.index_add_(0, slots, step)


def commit_snapshot(initial_state: Tensor, snapshots: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    """See `replayssm.ops.commit_snapshot`."""
    rows = live_rows(torch.where(accepted > 0, ssm_state_indices, -1))
    if rows.length == 0:
        return
    row = torch.arange(accepted.shape[0], device=accepted.device) if rows.where is None else rows.where
    at = accepted[row].long() - 1
    if initial_state.ndim == 5:
        initial_state[:, rows.slots] = snapshots[:, row, at]
    else:
        initial_state[rows.slots] = snapshots[row, at]


def commit_conv(conv_state: Tensor, window: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    """See `replayssm.ops.commit_conv`."""
    rows = live_rows(torch.where(accepted > 0, ssm_state_indices, -1))
    if rows.length == 0:
        return
    size = conv_state.shape[-1]
    shift = torch.arange(size, device=accepted.device) + rows.take(accepted).unsqueeze(1)
    pools = zip(conv_state, window, strict=True) if conv_state.ndim == 4 else iter([(conv_state, window)])
    for state, inputs in pools:
        seen = torch.cat([state.index_select(0, rows.slots), rows.take(inputs).mT.to(state.dtype)], 2)
        at = shift.unsqueeze(1).expand(-1, seen.shape[1], -1)
        state.index_copy_(0, rows.slots, seen.gather(2, at))


def causal_conv_verify(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ssm_state_indices: Tensor,
    lengths: Tensor,
    activation: str | None,
    out: Tensor,
) -> None:
    """See `replayssm.ops.causal_conv_verify`."""
    rows, tokens, width = live_rows(ssm_state_indices), x.shape[1], weight.shape[1]
    if rows.where is not None:
        out.zero_()
    if rows.length == 0:
        return
    dead = torch.arange(tokens, device=x.device) >= rows.take(lengths).unsqueeze(1)
    now = rows.take(x)
    state = conv_state.index_select(0, rows.slots)[:, :, conv_state.shape[2] - width + 1 :].mT
    # Tokens that are history to later ones have the precision of the conv state, as if they had been pushed into it.
    seen = torch.cat([state, now.to(state.dtype)], 1).float()  # [n, W-1+T, C]
    y = now * weight[:, -1].float()
    for i in range(width - 1):  # the taps, not the rows
        y.addcmul_(seen[:, i : i + tokens], weight[:, i].float())
    if bias is not None:
        y.add_(bias)
    if activation == "silu":
        y = F.silu(y, inplace=True)
    rows.put(out, y.masked_fill_(dead.unsqueeze(2), 0))
