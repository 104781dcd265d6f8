"""Norms, gates and decay weights in fp32 torch. Formulas: docs/mathematics.md."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6  # inside the square root, as in the models that were trained with it

# exp() of anything below about -104 is 0 in fp32, so a log decay floored here is the same decay. It turns -inf
# into a number, and sums of log decays can then be formed as a product with a 0/1 matrix.
LOG_DECAY_FLOOR = -200.0


def l2norm(x: Tensor) -> Tensor:
    """x·rsqrt(Σx² + 1e-6) over the last axis; x is fp32."""
    return x * torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().unsqueeze(-1)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, is_kda: bool, lower_bound: float | None) -> Tensor:
    """Log decay g <= 0, fp32: [B, HV] (GDN) or [B, HV, K] (KDA).

    -exp(A_log)·softplus(a + dt_bias), or lower_bound·sigmoid(exp(A_log)·(a + dt_bias)) for the bounded gate.
    A_log and dt_bias are widened before use, whatever dtype the checkpoint held them in.
    """
    x = a.float() + dt_bias.float()
    rate = A_log.float().clamp_max(88.0).exp()  # finite, so that rate·softplus is never inf·0
    if is_kda:
        rate = rate.unsqueeze(-1)
    if lower_bound is not None:
        g = torch.sigmoid(x.mul_(rate)).mul_(lower_bound)
    else:
        g = F.softplus(x).mul_(rate).neg_()
    return g.clamp_min_(LOG_DECAY_FLOOR)


def decay_weights(g: Tensor, g_now: Tensor | None) -> Tensor:
    """Decay from each record, and from the checkpoint, to now; fp32 [rows·heads, n + 1, 1 or K].

    `g` is [rows·heads, n] or [rows·heads, n, K]: per-step log decay of the n records; `g_now` the current step's,
    without the axis n, or None. Entry 0 is exp(Σ g + g_now), the decay of the checkpoint; entry 1 + j is
    exp(Σ_{i>j} g_i + g_now), the decay of record j.

    Each sum runs over the later steps only. The difference of two cumulative sums would say the same in exact
    arithmetic, but loses digits after strong decay and gives NaN after -inf.
    """
    n = g.shape[1]
    later = _later(n, g.device)
    if g.ndim == 2:
        sums = g @ later.mT if g_now is None else torch.addmm(g_now.unsqueeze(1), g, later.mT)
        return sums.exp_().unsqueeze(-1)
    later = later.expand(g.shape[0], n + 1, n)
    sums = torch.bmm(later, g) if g_now is None else torch.baddbmm(g_now.unsqueeze(1), later, g)
    return sums.exp_()


@lru_cache(maxsize=256)
def _later(n: int, device: torch.device) -> Tensor:
    """[n + 1, n] of 0 and 1: row 0 takes every step, row 1 + j takes the steps after record j."""
    with torch.inference_mode(False):
        return torch.ones(n + 1, n, dtype=torch.float32, device=device).triu()
