"""What tensor cores cost: replay that rebuilds the state by a matrix product with rounded operands.

Others form S = S₀·w₋₁ + Σ_j d_j (w_j ∘ k̂_j)ᵀ by a product of an L-row matrix of d and one of k̂, and read the output
from S. Tensor cores take such operands as bf16 or tf32, products and sums are fp32. The decay w_j goes to d for GDN and
to k̂ for KDA, before the rounding. Everything else here is fp32, the ring included, so what is measured is the rounding
of the operands and nothing else. `decode` with operands "exact" is the same code without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from replayssm.reference.gates import l2norm
from replayssm.reference.inputs import per_value_head, prepare


def tf32(x: Tensor) -> Tensor:
    """fp32 rounded to 10 bits after the point, ties away from zero, as `cvt.rna.tf32.f32` does; finite numbers."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def bf16(x: Tensor) -> Tensor:
    """fp32 rounded to bfloat16 and back."""
    return x.bfloat16().float()


OPERANDS: dict[str, Callable[[Tensor], Tensor]] = {"exact": lambda x: x, "tf32": tf32, "bf16": bf16}


def op(operands: str) -> Callable[..., Tensor]:
    """A stand-in for `ops.fused_recurrent_linear_replayssm_decode`."""
    return partial(decode, OPERANDS[operands])


def decode(
    operand: Callable[[Tensor], Tensor],
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Arguments, ring and result of the op; no padding rows. The state is read from S, and folded as it was rebuilt."""
    _, hv, v_dim, k_dim = initial_state.shape
    length, slots, count = d_cache.shape[2], ssm_state_indices.long(), write_pos.long()
    now = prepare(
        mixed_qkv, a, b, A_log, dt_bias, scale, hv, v_dim, k_dim, use_qk_l2norm_in_kernel, is_kda, lower_bound,
        beta_scale, torch.float32,
    )  # fmt: skip
    dead = (torch.arange(length, device=count.device) >= count[:, None])[:, None, :, None]
    d = d_cache[slots].masked_fill(dead, 0)
    k_raw = k_cache[slots].float().masked_fill(dead, 0)
    k = per_value_head((l2norm(k_raw) if use_qk_l2norm_in_kernel else k_raw).transpose(1, 2), hv).transpose(1, 2)
    g = g_cache[slots] if is_kda else g_cache[slots].unsqueeze(-1)
    g = g.masked_fill(dead, 0)

    from_record = g.flip(2).cumsum(2).flip(2)  # a sum of the gates from each record on
    weight = torch.cat([from_record[:, :, 1:], torch.zeros_like(g[:, :, :1])], 2).exp()
    left, right = (d, k * weight) if is_kda else (d * weight, k)
    state = initial_state[slots].float() * from_record[:, :, :1].exp() + operand(left).mT @ operand(right)
    state = state * now.g.exp().unsqueeze(-2)
    new = now.beta.unsqueeze(-1) * (now.v - (state @ now.k.unsqueeze(-1)).squeeze(-1))
    out[:, 0] = (state @ now.q.unsqueeze(-1)).squeeze(-1) + new * (now.k * now.q).sum(-1, keepdim=True)

    fold = count == length - 1
    if force_flush is not None:
        fold |= force_flush != 0
    folded = state + new.unsqueeze(-1) * now.k.unsqueeze(-2)
    initial_state[slots[fold]] = folded[fold].to(initial_state.dtype)
    slots, count = slots[~fold], count[~fold]
    d_cache[slots, :, count] = new[~fold]
    k_cache[slots, :, count] = now.k_raw[~fold].to(k_cache.dtype)
    g_cache[slots, :, count] = (now.g if is_kda else now.g.squeeze(-1))[~fold]
    return out
