"""Cursors: one small kernel each, decided on the device, so that a CUDA graph can capture them."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import CURSOR_ROWS, OPTIONS, on_device


@triton.jit
def advance_kernel(
    cursor_ptr, slot_ptr, force_ptr, count_ptr, num_rows, ring_len, cursor_step, slot_step, force_step, count_step,
    HAS_FORCE: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cursor[slot] <- 0 where the row flushed, else cursor + tokens."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row * slot_step, mask=inside, other=-1).to(tl.int64)
    live = inside & (slot >= 0)
    at = cursor_ptr + slot * cursor_step
    pos = tl.load(at, mask=live, other=0)
    if HAS_COUNT:
        pos += tl.load(count_ptr + row * count_step, mask=live, other=0)
    else:
        pos += 1
    flushed = pos >= ring_len
    if HAS_FORCE:
        flushed = flushed | (tl.load(force_ptr + row * force_step, mask=live, other=0) != 0)
    tl.store(at, tl.where(flushed, 0, pos), mask=live)


@triton.jit
def gather_kernel(cursor_ptr, slot_ptr, out_ptr, num_rows, cursor_step, slot_step, BLOCK: tl.constexpr):
    """out[row] = cursor[slot], 0 for padding."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row * slot_step, mask=inside, other=-1).to(tl.int64)
    pos = tl.load(cursor_ptr + slot * cursor_step, mask=inside & (slot >= 0), other=0)
    tl.store(out_ptr + row, pos, mask=inside)


@triton.jit
def force_kernel(
    lens_ptr, slot_ptr, out_ptr, num_rows, interval, lens_step, slot_step, out_step,
    HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = 1 where the length is a positive multiple of the interval and the row is no padding."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_rows
    length = tl.load(lens_ptr + row * lens_step, mask=inside, other=0)
    flag = (length > 0) & (length % interval == 0)
    if HAS_SLOTS:
        flag = flag & (tl.load(slot_ptr + row * slot_step, mask=inside, other=-1) >= 0)
    tl.store(out_ptr + row * out_step, flag.to(tl.int32), mask=inside)


def advance_cursors(
    cursor: Tensor, ssm_state_indices: Tensor, ring_len: int, force_flush: Tensor | None, num_tokens: Tensor | None
) -> None:
    """See `replayssm.ops.advance_cursors`."""
    rows = ssm_state_indices.shape[0]
    if not rows:
        return
    force = cursor if force_flush is None else force_flush
    count = cursor if num_tokens is None else num_tokens
    with on_device(cursor):
        advance_kernel[(triton.cdiv(rows, CURSOR_ROWS),)](
            cursor, ssm_state_indices, force, count, rows, ring_len, cursor.stride(0), ssm_state_indices.stride(0),
            force.stride(0), count.stride(0), HAS_FORCE=force_flush is not None, HAS_COUNT=num_tokens is not None,
            BLOCK=CURSOR_ROWS, num_warps=4, **OPTIONS,
        )  # fmt: skip


def gather_cursors(cursor: Tensor, ssm_state_indices: Tensor) -> Tensor:
    """See `replayssm.ops.gather_cursors`. The result is the one allocation of this backend."""
    rows = ssm_state_indices.shape[0]
    out = torch.empty(rows, dtype=torch.int32, device=cursor.device)
    if rows:
        with on_device(cursor):
            gather_kernel[(triton.cdiv(rows, CURSOR_ROWS),)](
                cursor, ssm_state_indices, out, rows, cursor.stride(0), ssm_state_indices.stride(0),
                BLOCK=CURSOR_ROWS, num_warps=4, **OPTIONS,
            )  # fmt: skip
    return out


def force_flush_mask(seq_lens: Tensor, interval: int, ssm_state_indices: Tensor | None, out: Tensor) -> None:
    """See `replayssm.ops.force_flush_mask`."""
    rows = seq_lens.shape[0]
    if interval <= 0:
        out.zero_()
    elif rows:
        slots = seq_lens if ssm_state_indices is None else ssm_state_indices
        with on_device(out):
            force_kernel[(triton.cdiv(rows, CURSOR_ROWS),)](
                seq_lens, slots, out, rows, interval, seq_lens.stride(0), slots.stride(0), out.stride(0),
                HAS_SLOTS=ssm_state_indices is not None, BLOCK=CURSOR_ROWS, num_warps=4, **OPTIONS,
            )  # fmt: skip
