"""Causal depthwise convolution of one token a row, on a pool of windows."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.errors import OptionError, ShapeError
from replayssm.ops import validate
from replayssm.ops.library import OPS


def causal_conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ssm_state_indices: Tensor,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Convolve the newest token with its W-1 predecessors and push it into the window. Returns [B, C].

    y = activation(Σ_i weight[:, i]·history_i + weight[:, W-1]·x + bias), summed in fp32. The history is the last
    W-1 columns of the window, newest last; afterwards the whole window moves one column to the left and x becomes
    its last column. Rows with slot < 0 give zeros and touch nothing.

    Args:
        x: [B, C] fp32, bf16 or fp16; any stride.
        conv_state: windows [slots, C, S], S >= W-1, in place; fp32, bf16 or fp16. Each is contiguous, or the
            transpose of a contiguous [S, C], which a GPU reads and writes faster.
        weight: [C, W]; the last column multiplies the newest token.
        bias: [C] or None.
        ssm_state_indices: [B] int32, live slots distinct.
        activation: "silu" or None.
        out: [B, C]; allocated in the dtype of x when None. May be x itself.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, OptionError: before anything is written.
    """
    validate.ndim("x", x, ("B", "C"))
    validate.ndim("conv_state", conv_state, ("slots", "C", "S"))
    validate.ndim("weight", weight, ("C", "W"))
    rows, channels = x.shape
    width, size = weight.shape[1], conv_state.shape[2]
    validate.shape("weight", weight, (channels, width), "C of x")
    validate.shape("conv_state", conv_state, (conv_state.shape[0], channels, size), "C of x")
    if width < 1 or size < width - 1:
        raise ShapeError(
            f"conv_state holds {size} columns, but a kernel of width {width} needs at least {width - 1} of history"
        )
    if bias is not None:
        validate.shape("bias", bias, (channels,), "C of x")
    if out is None:
        out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    else:
        validate.shape("out", out, (rows, channels), "that of x")
        validate.last_dim("out", out)
    for name, t in (("x", x), ("conv_state", conv_state), ("weight", weight), ("bias", bias), ("out", out)):
        if t is not None:
            validate.dtype(name, t, validate.FLOATS)
    channels_last = conv_state.stride(1) == 1 and channels > 1 and size > 1
    validate.dense_inner("conv_state", conv_state.mT if channels_last else conv_state, 1)
    validate.indices("ssm_state_indices", ssm_state_indices, rows, "one slot for each row of x")
    validate.same_device(
        "x", x, conv_state=conv_state, weight=weight, bias=bias, ssm_state_indices=ssm_state_indices, out=out
    )
    if activation not in (None, "silu"):
        raise OptionError(f"activation {activation!r} is unknown; use 'silu' or None")
    if rows and channels:
        OPS.causal_conv_update(x, conv_state, weight, bias, ssm_state_indices, activation, out)
    return out
