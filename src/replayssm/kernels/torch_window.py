"""Windows of several tokens a row, prepared for the torch backend: norms, gates, and zeros for dead tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.kernels.torch_math import l2norm, log_decay
from replayssm.kernels.torch_rows import Rows


class Window(NamedTuple):
    """n live rows, T tokens each, fp32; a token past the length of its row has zeros everywhere, so d is 0 and it
    decays nothing.

    alive [n, T]; q, k [n, T, H, K], q scaled; k_raw [n, T, H, K] as it came, not cleaned; v [n, T, HV, V];
    g [n, T, HV, 1 or K]; beta [n, T, HV].
    """

    alive: Tensor
    q: Tensor
    k: Tensor
    k_raw: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def window(
    rows: Rows, counts: Tensor, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    heads: tuple[int, int, int], use_l2norm: bool, is_kda: bool, lower_bound: float | None, beta_scale: float,
) -> Window:  # fmt: skip
    """counts: tokens of the live rows [n]; heads: HV, V, K; the others as the operations take them."""
    hv, v_dim, k_dim = heads
    n, tokens = rows.length, mixed_qkv.shape[1]
    h = (mixed_qkv.shape[2] - hv * v_dim) // (2 * k_dim)
    alive = torch.arange(tokens, device=counts.device) < counts.unsqueeze(1)
    dead = None if bool(alive.all()) else ~alive

    def clean(x: Tensor) -> Tensor:  # by selection: what a dead token has may be NaN
        return x if dead is None else x.masked_fill(dead.view(n, tokens, *[1] * (x.ndim - 2)), 0)

    qkv = rows.take(mixed_qkv)
    qk = clean(qkv[..., : 2 * h * k_dim].float()).unflatten(2, (2, h, k_dim))
    if use_l2norm:
        qk = l2norm(qk)
    q, k = qk.unbind(2)
    g = log_decay(rows.take(a), A_log, dt_bias, is_kda, lower_bound)
    beta = torch.sigmoid(rows.take(b).float()).mul_(beta_scale)
    return Window(
        alive,
        q * scale,
        k,
        qkv[..., h * k_dim : 2 * h * k_dim].unflatten(2, (h, k_dim)),
        clean(qkv[..., 2 * h * k_dim :].float()).unflatten(2, (hv, v_dim)),
        clean(g if is_kda else g.unsqueeze(-1)),
        clean(beta),
    )


def per_value_head(x: Tensor, hv: int) -> Tensor:
    """[n, T, H, K] to [n, HV, T, K]: value head hv uses key head hv // (HV / H)."""
    return x.transpose(1, 2).repeat_interleave(hv // x.shape[2], 1)
