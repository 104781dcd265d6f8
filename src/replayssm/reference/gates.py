"""Gates and norms of GDN and KDA."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without overflow: max(x, 0) + log1p(e^-|x|)."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def gdn_log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """g = -exp(A_log)·softplus(a + dt_bias); a [..., HV], A_log and dt_bias [HV]."""
    return -torch.exp(A_log.to(dtype)) * softplus(a.to(dtype) + dt_bias.to(dtype))


def kda_log_decay(
    a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """g of every key channel; a [..., HV, K], A_log [HV], dt_bias [HV, K].

    -exp(A_log)·softplus(a + dt_bias), or lower_bound·sigmoid(exp(A_log)·(a + dt_bias)) when there is a bound.
    """
    x, rate = a.to(dtype) + dt_bias.to(dtype), torch.exp(A_log.to(dtype)).unsqueeze(-1)
    return -rate * softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def beta(b: Tensor, beta_scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """beta_scale·sigmoid(b)."""
    return beta_scale * torch.sigmoid(b.to(dtype))


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(Σx² + 1e-6) over the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
