"""Replay: the state as a checkpoint and the records since, and the output read from both without forming it.

The ring of the reference holds d, raw k and the log decay of the record's own step, in the dtype of the caches
given; the caches of the ops hold whatever their backend likes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.reference.gates import l2norm
from replayssm.reference.inputs import per_value_head, prepare


class Pools(NamedTuple):
    """State [slots, HV, V, K], d [slots, HV, L, V], k [slots, H, L, K], g [slots, HV, L] or [slots, HV, L, K]."""

    initial_state: Tensor
    d_cache: Tensor
    k_cache: Tensor
    g_cache: Tensor


class Records(NamedTuple):
    """The n records of one slot: d [HV, n, V], k̂ [HV, n, K], g [HV, n, 1 or K]."""

    d: Tensor
    k: Tensor
    g: Tensor


def read_records(pools: Pools, slot: int, n: int, use_l2norm: bool, dtype: torch.dtype) -> Records:
    """ring[0:n] of a slot."""
    d, k, g = (cache[slot, :, :n].to(dtype) for cache in pools[1:])
    if use_l2norm:
        k = l2norm(k)
    if g.ndim == 2:
        g = g.unsqueeze(-1)
    return Records(d, per_value_head(k.transpose(0, 1), d.shape[0]).transpose(0, 1), g)


def decay_to_end(g: Tensor) -> tuple[Tensor, Tensor]:
    """From per-step log decays [HV, n, ·]: of the checkpoint e^{Σ g} [HV, ·], of each record e^{Σ_{i>j} g_i}."""
    n = g.shape[1]
    later = [g[:, j + 1 :].sum(1) for j in range(n)]
    return torch.exp(g.sum(1)), torch.exp(torch.stack(later, 1)) if n else torch.ones_like(g)


def folded(state: Tensor, records: Records) -> Tensor:
    """S·diag(e^G) + Σ_j d_j (e^{G - G_j} ∘ k̂_j)ᵀ: the true state [HV, V, K]."""
    checkpoint, weights = decay_to_end(records.g)
    return state * checkpoint.unsqueeze(-2) + records.d.mT @ (weights * records.k)


def replay_decode(
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
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Pools]:
    """Arguments as the op of the same name, without `out`. Returns out [B, 1, HV, V] in `dtype` and the new pools.

    S⁻x = S₀(e^{G+g} ∘ x) + Σ_j d_j·⟨e^{G-G_j+g} ∘ k̂_j, x⟩ for x = k̂ and q̂; d = β(v - S⁻k̂); o = S⁻q̂ + d(k̂·q̂).
    """
    hv, v_dim, k_dim = initial_state.shape[1:]
    s = prepare(
        mixed_qkv, a, b, A_log, dt_bias, scale, hv, v_dim, k_dim, use_qk_l2norm_in_kernel, is_kda, lower_bound,
        beta_scale, dtype,
    )  # fmt: skip
    before = Pools(initial_state, d_cache, k_cache, g_cache)
    after = Pools(*(p.clone() for p in before))
    out = s.v.new_zeros(s.v.shape)
    for row, (slot, n) in enumerate(zip(ssm_state_indices.tolist(), write_pos.tolist(), strict=True)):
        if slot < 0:
            continue
        records = read_records(before, slot, n, use_qk_l2norm_in_kernel, dtype)
        state, q, k, g = initial_state[slot].to(dtype), s.q[row], s.k[row], s.g[row]
        checkpoint, weights = decay_to_end(torch.cat([records.g, g.unsqueeze(1)], 1))
        weighted_k = weights[:, :n] * records.k
        readout_k, readout_q = (
            (state @ (checkpoint * x).unsqueeze(-1)).squeeze(-1)
            + ((weighted_k * x.unsqueeze(1)).sum(-1, keepdim=True) * records.d).sum(1)
            for x in (k, q)
        )
        d = s.beta[row].unsqueeze(-1) * (s.v[row] - readout_k)
        out[row] = readout_q + d * (k * q).sum(-1, keepdim=True)
        if n == d_cache.shape[2] - 1 or (force_flush is not None and force_flush[row]):
            new = (torch.cat([old, now.unsqueeze(1)], 1) for old, now in zip(records, (d, k, g), strict=True))
            after.initial_state[slot] = folded(state, Records(*new)).to(initial_state.dtype)
        else:
            write_record(after, slot, n, d, s.k_raw[row], g)
    return out.unsqueeze(1), after


def write_record(pools: Pools, slot: int, n: int, d: Tensor, k_raw: Tensor, g: Tensor) -> None:
    """Put one record at position n; g is [HV, 1 or K]."""
    pools.d_cache[slot, :, n] = d.to(pools.d_cache.dtype)
    pools.k_cache[slot, :, n] = k_raw.to(pools.k_cache.dtype)
    pools.g_cache[slot, :, n] = (g.squeeze(-1) if pools.g_cache.ndim == 3 else g).to(pools.g_cache.dtype)


def flush(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The pool with ring[0:write_pos] of the rows folded in (one layer)."""
    return materialize(
        initial_state, d_cache, k_cache, g_cache, ssm_state_indices, write_pos, initial_state, ssm_state_indices,
        use_qk_l2norm_in_kernel, dtype,
    )  # fmt: skip


def materialize(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    src_indices: Tensor,
    write_pos: Tensor,
    dst_state: Tensor,
    dst_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`dst_state` with the folded state of each source slot in its destination slot (one layer)."""
    pools, result = Pools(initial_state, d_cache, k_cache, g_cache), dst_state.clone()
    for src, n, dst in zip(src_indices.tolist(), write_pos.tolist(), dst_indices.tolist(), strict=True):
        if src >= 0 and dst >= 0:
            records = read_records(pools, src, n, use_qk_l2norm_in_kernel, dtype)
            result[dst] = folded(initial_state[src].to(dtype), records).to(result.dtype)
    return result


def advance_cursor(pos: int, ring_len: int, force_flush: bool = False, num_tokens: int = 1) -> int:
    """The next cursor of one slot: 0 after a flush, else pos + num_tokens."""
    return 0 if force_flush or pos + num_tokens >= ring_len else pos + num_tokens


def force_flush(length: int, interval: int, slot: int = 0) -> bool:
    """Whether a row must fold on the step after which its sequence has `length` tokens; interval <= 0: never."""
    return slot >= 0 and length > 0 and interval > 0 and length % interval == 0
