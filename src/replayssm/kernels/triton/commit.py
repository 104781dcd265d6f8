"""What follows a window: cursors, conv windows and snapshots of all layers move on by what was kept, a launch each."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import CONV_COLUMNS, COPY, CURSOR_ROWS, OPTIONS, on_device, power_of_2
from replayssm.kernels.triton.numerics import sigmoid


@triton.jit
def cursor_kernel(
    cursor_ptr, slot_ptr, count_ptr, kept_ptr, force_ptr, num_rows, ring_len, cursor_step, slot_step, count_step,
    kept_step, force_step, HAS_FORCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cursor[slot] <- (0 where the row flushed, else cursor) + kept."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row * slot_step, mask=inside, other=-1).to(tl.int64)
    live = inside & (slot >= 0)
    at = cursor_ptr + slot * cursor_step
    pos = tl.load(at, mask=live, other=0)
    flushed = pos + tl.load(count_ptr + row * count_step, mask=live, other=0) >= ring_len
    if HAS_FORCE:
        flushed = flushed | (tl.load(force_ptr + row * force_step, mask=live, other=0) != 0)
    kept = tl.load(kept_ptr + row * kept_step, mask=live, other=0)
    tl.store(at, tl.where(flushed, 0, pos) + kept, mask=live)


@triton.jit
def snapshot_kernel(
    state_ptr, snap_ptr, slot_ptr, kept_ptr, num_rows, blocks, state_layer, state_slot, snap_layer, snap_row,
    snap_token, slot_step, kept_step, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: layers x rows x blocks of the N elements of a state, on one axis."""
    pid = tl.program_id(0)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    entry = pid // blocks
    row = (entry % num_rows).to(tl.int64)
    layer = (entry // num_rows).to(tl.int64)
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    kept = tl.load(kept_ptr + row * kept_step).to(tl.int64)
    if (slot < 0) | (kept <= 0):
        return
    source = snap_ptr + layer * snap_layer + row * snap_row + (kept - 1) * snap_token
    target = state_ptr + layer * state_layer + slot * state_slot
    tl.store(target + at, tl.load(source + at, mask=at < N), mask=at < N)


@triton.jit
def push_kernel(
    state_ptr, x_ptr, slot_ptr, kept_ptr, num_rows, blocks, state_layer, state_slot, state_chan, state_col,
    x_layer, x_row, x_token, x_chan, slot_step, kept_step, C: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: layers x rows x blocks of channels, on one axis. Column j becomes what lay `kept` columns further on."""
    pid = tl.program_id(0)
    chan = (pid % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    entry = pid // blocks
    row = (entry % num_rows).to(tl.int64)
    layer = (entry // num_rows).to(tl.int64)
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    kept = tl.load(kept_ptr + row * kept_step).to(tl.int64)
    if (slot < 0) | (kept <= 0):
        return
    inside = chan < C
    column = state_ptr + layer * state_layer + slot * state_slot + chan * state_chan
    token = x_ptr + layer * x_layer + row * x_row + chan * x_chan
    for j in range(S):
        source = j + kept
        old = tl.load(column + source * state_col, mask=chan < tl.where(source < S, C, 0), other=0.0)
        new = tl.load(token + (source - S) * x_token, mask=chan < tl.where(source >= S, C, 0), other=0.0)
        moved = tl.where(source < S, old, new.to(state_ptr.dtype.element_ty))
        tl.debug_barrier()  # whoever stores a column may be another thread than the one that has loaded it
        tl.store(column + j * state_col, moved, mask=inside)


@triton.jit
def conv_window_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, slot_ptr, count_ptr, out_ptr, blocks, tokens,
    x_row, x_token, x_chan, state_slot, state_chan, state_col, weight_chan, weight_tap, bias_chan, slot_step,
    count_step, out_row, out_token,
    C: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Grid: rows x tokens x blocks of channels, on one axis. Reads the conv state, writes nothing but the output."""
    pid = tl.program_id(0)
    chan = (pid % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    t = (pid // blocks % tokens).to(tl.int64)
    row = (pid // (blocks * tokens)).to(tl.int64)
    inside = chan < C
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    out_at = out_ptr + row * out_row + t * out_token + chan
    if (slot < 0) | (t >= tl.load(count_ptr + row * count_step)):
        tl.store(out_at, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
        return
    x_at = x_ptr + row * x_row + chan * x_chan
    column = state_ptr + slot * state_slot + chan * state_chan
    tap = weight_ptr + chan * weight_chan
    x = tl.load(x_at + t * x_token, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(tap + (W - 1) * weight_tap, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(W - 1):
        past = t - (W - 1) + i  # before the window: a column of the state
        new = tl.load(x_at + past * x_token, mask=chan < tl.where(past >= 0, C, 0), other=0.0)
        old = tl.load(column + (S + past) * state_col, mask=chan < tl.where(past < 0, C, 0), other=0.0)
        # What is history has the precision of the conv state, as if it had been pushed into it.
        u = tl.where(past < 0, old, new.to(state_ptr.dtype.element_ty)).to(tl.float32)
        y += u * tl.load(tap + i * weight_tap, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + chan * bias_chan, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y * sigmoid(y)
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=inside)


def commit_cursors(
    cursor: Tensor, ssm_state_indices: Tensor, ring_len: int, lengths: Tensor, accepted: Tensor,
    force_flush: Tensor | None,
) -> None:  # fmt: skip
    """See `replayssm.ops.commit_cursors`."""
    rows = ssm_state_indices.shape[0]
    if not rows:
        return
    force = accepted if force_flush is None else force_flush
    with on_device(cursor):
        cursor_kernel[(triton.cdiv(rows, CURSOR_ROWS),)](
            cursor, ssm_state_indices, lengths, accepted, force, rows, ring_len, cursor.stride(0),
            ssm_state_indices.stride(0), lengths.stride(0), accepted.stride(0), force.stride(0),
            HAS_FORCE=force_flush is not None, BLOCK=CURSOR_ROWS, num_warps=4, **OPTIONS,
        )  # fmt: skip


def commit_snapshot(initial_state: Tensor, snapshots: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    """See `replayssm.ops.commit_snapshot`."""
    rows, layered = ssm_state_indices.shape[0], initial_state.ndim == 5
    layers = initial_state.shape[0] if layered else 1
    size = initial_state.shape[-3:].numel()
    block, warps = COPY
    blocks = triton.cdiv(size, block)
    if not rows or not layers:
        return
    with on_device(initial_state):
        snapshot_kernel[(layers * rows * blocks,)](
            initial_state, snapshots, ssm_state_indices, accepted, rows, blocks,
            initial_state.stride(0) if layered else 0, initial_state.stride(-4),
            snapshots.stride(0) if layered else 0, *snapshots.stride()[-5:-3], ssm_state_indices.stride(0),
            accepted.stride(0), N=size, BLOCK=block, num_warps=warps, **OPTIONS,
        )  # fmt: skip


def commit_conv(conv_state: Tensor, window: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    """See `replayssm.ops.commit_conv`."""
    rows, layered = ssm_state_indices.shape[0], conv_state.ndim == 4
    layers = conv_state.shape[0] if layered else 1
    channels, size = conv_state.shape[-2:]
    most, warps = CONV_COLUMNS
    block = min(most, power_of_2(max(channels, 1)))
    blocks = triton.cdiv(channels, block)
    if not rows or not layers or not size or not channels:
        return
    with on_device(conv_state):
        push_kernel[(layers * rows * blocks,)](
            conv_state, window, ssm_state_indices, accepted, rows, blocks, conv_state.stride(0) if layered else 0,
            *conv_state.stride()[-3:], window.stride(0) if layered else 0, *window.stride()[-3:],
            ssm_state_indices.stride(0), accepted.stride(0), C=channels, S=size, BLOCK=block, num_warps=warps,
            **OPTIONS,
        )  # fmt: skip


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
    rows, tokens, channels = x.shape
    if not rows or not tokens or not channels:
        return
    most, warps = CONV_COLUMNS
    block = min(most, power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    some_bias = weight if bias is None else bias
    with on_device(x):
        conv_window_kernel[(rows * tokens * blocks,)](
            x, conv_state, weight, some_bias, ssm_state_indices, lengths, out, blocks, tokens, *x.stride(),
            *conv_state.stride(), *weight.stride(), some_bias.stride(0), ssm_state_indices.stride(0),
            lengths.stride(0), *out.stride()[:2], C=channels, W=weight.shape[1], S=conv_state.shape[2], BLOCK=block,
            HAS_BIAS=bias is not None, SILU=activation == "silu", num_warps=warps, **OPTIONS,
        )  # fmt: skip
