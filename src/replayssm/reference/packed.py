"""Packed decode: one step of the recurrence on a pool of states."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.reference.inputs import prepare
from replayssm.reference.serial import recurrent_step


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Arguments as the op of the same name, without `out`. Returns out [B, 1, HV, V] in `dtype` and the new pool."""
    hv, v_dim, k_dim = initial_state.shape[1:]
    s = prepare(
        mixed_qkv, a, b, A_log, dt_bias, scale, hv, v_dim, k_dim, use_qk_l2norm_in_kernel, is_kda, lower_bound,
        beta_scale, dtype,
    )  # fmt: skip
    pool, out = initial_state.clone(), s.v.new_zeros(s.v.shape)
    for row, slot in enumerate(ssm_state_indices.tolist()):
        if slot >= 0:
            state = initial_state[slot].to(dtype)
            out[row], _, state = recurrent_step(state, s.q[row], s.k[row], s.v[row], s.g[row], s.beta[row])
            pool[slot] = state.to(pool.dtype)
    return out.unsqueeze(1), pool
