"""Cursors of the torch backend. Device-only: no readback, no boolean indexing, so a CUDA graph can capture it."""

from __future__ import annotations

from torch import Tensor


def advance_cursors(
    cursor: Tensor, ssm_state_indices: Tensor, ring_len: int, force_flush: Tensor | None, num_tokens: Tensor | None
) -> None:
    """See `replayssm.ops.advance_cursors`."""
    slots = ssm_state_indices.clamp_min(0)
    pos = cursor.index_select(0, slots)
    nxt = pos + (1 if num_tokens is None else num_tokens)
    flushed = nxt >= ring_len
    if force_flush is not None:
        flushed |= force_flush != 0
    step = nxt.masked_fill_(flushed, 0).sub_(pos).masked_fill_(ssm_state_indices < 0, 0)
    # Adding, not storing: padding rows add 0 to slot 0 and so cannot race with the row that owns it.
    cursor.index_add_(0, slots, step)


def gather_cursors(cursor: Tensor, ssm_state_indices: Tensor) -> Tensor:
    """See `replayssm.ops.gather_cursors`."""
    return cursor.index_select(0, ssm_state_indices.clamp_min(0)).masked_fill_(ssm_state_indices < 0, 0)


def force_flush_mask(seq_lens: Tensor, interval: int, ssm_state_indices: Tensor | None, out: Tensor) -> None:
    """See `replayssm.ops.force_flush_mask`."""
    if interval <= 0:
        out.zero_()
        return
    flag = (seq_lens > 0) & (seq_lens.long().remainder(interval) == 0)
    if ssm_state_indices is not None:
        flag &= ssm_state_indices >= 0
    out.copy_(flag)
