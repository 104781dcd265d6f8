"""Causal depthwise convolution of a window of tokens, on a pool of conv states that it only reads."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.errors import OptionError, ShapeError
from replayssm.ops import validate, windows
from replayssm.ops.library import OPS


def causal_conv_verify(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ssm_state_indices: Tensor,
    lengths: Tensor,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Convolve T tokens a row with those before them and with the conv state, which stays as it is. Returns [B, T, C].

    y_t as in `causal_conv_update` after the tokens before t. `commit_conv` pushes the tokens that are kept into the
    state afterwards; it needs `x` for that, so keep it. Zero in padding rows and past the length of a row.

    Args:
        x: [B, T, C] fp32, bf16 or fp16, T <= 64; any stride.
        conv_state: [slots, C, S], S >= W-1; fp32, bf16 or fp16. Each is contiguous, or the transpose of a contiguous
            [S, C]. Read only.
        weight: [C, W]; the last column multiplies the newest token.
        bias: [C] or None.
        ssm_state_indices: [B] int32.
        lengths: tokens of each row [B] int32, 0 … T.
        activation: "silu" or None.
        out: [B, T, C], not x; allocated in the dtype of x when None.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, OptionError: before anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    rows, _, size = windows.conv("x", x, conv_state, ssm_state_indices)
    channels = x.shape[2]
    validate.ndim("weight", weight, ("C", "W"))
    width = weight.shape[1]
    validate.shape("weight", weight, (channels, width), "C of x")
    if width < 1 or size < width - 1:
        raise ShapeError(
            f"conv_state holds {size} columns, but a kernel of width {width} needs at least {width - 1} of history"
        )
    if bias is not None:
        validate.shape("bias", bias, (channels,), "C of x")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.data_ptr() == x.data_ptr() and x.numel():
        raise OptionError("out is x itself; the commit needs x as it is, so give another tensor")
    validate.shape("out", out, tuple(x.shape), "that of x")
    validate.last_dim("out", out)
    for name, t in (("weight", weight), ("bias", bias), ("out", out)):
        if t is not None:
            validate.dtype(name, t, validate.FLOATS)
    validate.indices("lengths", lengths, rows, "one for each row of x")
    validate.same_device("x", x, weight=weight, bias=bias, lengths=lengths, out=out)
    if activation not in (None, "silu"):
        raise OptionError(f"activation {activation!r} is unknown; use 'silu' or None")
    if rows and channels:
        OPS.causal_conv_verify(x, conv_state, weight, bias, ssm_state_indices, lengths, activation, out)
    return out
