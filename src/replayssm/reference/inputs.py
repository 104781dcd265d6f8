"""From the packed arguments of a decode to q, k, v, g and β of every value head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.reference import gates


class Step(NamedTuple):
    """q, k [..., HV, K], v [..., HV, V], g [..., HV, 1 or K], beta [..., HV], k_raw [..., H, K].

    q is normalised and scaled, k normalised; k_raw is what a ring keeps.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    k_raw: Tensor


def per_value_head(x: Tensor, num_v_heads: int) -> Tensor:
    """[..., H, K] to [..., HV, K]: value head hv uses key head hv // (HV / H)."""
    ratio = num_v_heads // x.shape[-2]
    return torch.stack([x[..., hv // ratio, :] for hv in range(num_v_heads)], -2)


def prepare(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    num_v_heads: int,
    head_v_dim: int,
    head_k_dim: int,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
    dtype: torch.dtype,
) -> Step:
    """Split [..., 2·H·K + HV·V] into heads and apply norms and gates; any leading axes."""
    hv, v_dim, k_dim = num_v_heads, head_v_dim, head_k_dim
    lead = mixed_qkv.shape[:-1]
    h = (mixed_qkv.shape[-1] - hv * v_dim) // (2 * k_dim)
    q, k_raw, v = mixed_qkv.split([h * k_dim, h * k_dim, hv * v_dim], -1)
    k_raw = k_raw.reshape(*lead, h, k_dim)
    q, k = q.reshape(*lead, h, k_dim).to(dtype), k_raw.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k = gates.l2norm(q), gates.l2norm(k)
    q = q * (k_dim**-0.5 if scale is None else scale)
    if is_kda:
        g = gates.kda_log_decay(a, A_log, dt_bias, lower_bound, dtype)
    else:
        g = gates.gdn_log_decay(a, A_log, dt_bias, dtype).unsqueeze(-1)
    beta = gates.beta(b, beta_scale, dtype)
    v = v.reshape(*lead, hv, v_dim).to(dtype)
    return Step(per_value_head(q, hv), per_value_head(k, hv), v, g, beta, k_raw)
