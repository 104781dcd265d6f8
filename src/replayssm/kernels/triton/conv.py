"""Causal depthwise convolution, one token a row, on a pool of windows."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import CONV_COLUMNS, CONV_TILE, OPTIONS, on_device, power_of_2
from replayssm.kernels.triton.numerics import sigmoid


@triton.jit
def conv_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, slot_ptr, out_ptr, blocks,
    x_row, x_chan, state_slot, state_chan, state_col, weight_chan, weight_tap, bias_chan, slot_step, out_row,
    C: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr,
    BY_COLUMN: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid: rows x blocks of channels, on one axis.

    The window of BLOCK channels is a tile [BLOCK, BS], BS >= S; or, where channels are neighbours in memory, S vectors.
    """
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    chan = (pid % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = chan < C
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    out_at = out_ptr + row * out_row + chan
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
        return

    x = tl.load(x_ptr + row * x_row + chan * x_chan, mask=inside, other=0.0).to(tl.float32)
    tap = weight_ptr + chan * weight_chan
    y = x * tl.load(tap + (W - 1) * weight_tap, mask=inside, other=0.0).to(tl.float32)
    if BY_COLUMN:
        column = state_ptr + slot * state_slot + chan * state_chan
        for j in tl.static_range(max(0, S - W + 1), S):
            u = tl.load(column + j * state_col, mask=inside, other=0.0).to(tl.float32)
            y += u * tl.load(tap + (j - (S - W + 1)) * weight_tap, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(1, S):
            moved = tl.load(column + j * state_col, mask=inside, other=0.0)
            tl.debug_barrier()  # whoever stores column j-1 may be another thread than the one that has loaded it
            tl.store(column + (j - 1) * state_col, moved, mask=inside)
        tl.debug_barrier()
        tl.store(column + (S - 1) * state_col, x.to(state_ptr.dtype.element_ty), mask=inside)
    elif S > 0:
        i = tl.arange(0, BS)[None, :]
        window = state_ptr + slot * state_slot + chan[:, None] * state_chan + i * state_col
        history = inside[:, None] & (i > S - W) & (i < S)  # the newest W-1 columns
        u = tl.load(window, mask=history, other=0.0).to(tl.float32)
        y += tl.sum(u * tl.load(tap[:, None] + (i - (S - W + 1)) * weight_tap, mask=history, other=0.0), 1)
        moved = tl.load(window + state_col, mask=inside[:, None] & (i < S - 1), other=0.0)
        moved = tl.where(i == S - 1, x[:, None].to(state_ptr.dtype.element_ty), moved)
        tl.debug_barrier()  # a column is stored by another thread than the one that loads it: all loads first
        tl.store(window, moved, mask=inside[:, None] & (i < S))
    if HAS_BIAS:
        y += tl.load(bias_ptr + chan * bias_chan, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y * sigmoid(y)
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=inside)


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
    (rows, channels), size = x.shape, conv_state.shape[2]
    if not rows or not channels:
        return
    by_column = size > 0 and conv_state.stride(1) == 1
    most, warps = CONV_COLUMNS if by_column else CONV_TILE
    block = min(most, power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    some_bias = weight if bias is None else bias
    with on_device(x):
        conv_kernel[(rows * blocks,)](
            x, conv_state, weight, some_bias, ssm_state_indices, out, blocks,
            x.stride(0), x.stride(1), *conv_state.stride(), weight.stride(0), weight.stride(1), some_bias.stride(0),
            ssm_state_indices.stride(0), out.stride(0),
            C=channels, W=weight.shape[1], S=size, BLOCK=block, BS=power_of_2(max(size, 1)),
            BY_COLUMN=by_column, HAS_BIAS=bias is not None, SILU=activation == "silu", num_warps=warps, **OPTIONS,
        )  # fmt: skip
