"""The recurrence, token by token. Everything else in this project is compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.reference.inputs import prepare


def recurrent_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token. S⁻ = S·diag(e^g), d = β(v - S⁻k), S' = S⁻ + d kᵀ, o = S'q. Returns (o, d, S').

    state [..., V, K], q and k [..., K], v [..., V], g [..., 1 or K], beta [...].
    """
    state = state * torch.exp(g).unsqueeze(-2)
    d = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + d.unsqueeze(-1) * k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1), d, state


def serial(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """T tokens of B requests: mixed_qkv [B, T, ·], a [B, T, HV(, K)], b [B, T, HV], initial_state [B, HV, V, K].

    Returns out [B, T, HV, V] and the final state [B, HV, V, K], both in `dtype`.
    """
    hv, v_dim, k_dim = initial_state.shape[1:]
    s = prepare(
        mixed_qkv, a, b, A_log, dt_bias, scale, hv, v_dim, k_dim, use_qk_l2norm_in_kernel, is_kda, lower_bound,
        beta_scale, dtype,
    )  # fmt: skip
    state, out = initial_state.to(dtype), s.v.new_empty(s.v.shape)
    for t in range(mixed_qkv.shape[1]):
        out[:, t], _, state = recurrent_step(state, s.q[:, t], s.k[:, t], s.v[:, t], s.g[:, t], s.beta[:, t])
    return out, state
