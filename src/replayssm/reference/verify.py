"""Several draft tokens at once: outputs of a window without a serial pass, then the commit of an accepted part.

With h_q, h_k the readouts of checkpoint + ring at the window's start and G_i the log decay since then,
    A = strictly_lower(β_i ⟨e^{G_i-G_j} ∘ k̂_i, k̂_j⟩)        D = (I + A)⁻¹ (β (V - h_k))
    O = h_q + lower(⟨e^{G_i-G_j} ∘ q̂_i, k̂_j⟩) D
so that only the T×T triangular solve is serial. Exponents are differences of later minus earlier steps, <= 0, and
are summed over the steps between, not subtracted from each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.reference.inputs import prepare
from replayssm.reference.replay import Pools, Records, advance_cursor, folded, read_records, write_record


class Window(NamedTuple):
    """Records of T draft tokens, not yet in a ring: d [B, T, HV, V], k_raw [B, T, H, K], g and k [B, T, HV, ·]."""

    d: Tensor
    k_raw: Tensor
    g: Tensor
    k: Tensor


def verify(
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
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Window]:
    """Outputs of T tokens a row: mixed_qkv [B, T, ·], a [B, T, HV(, K)], b [B, T, HV]. Changes no pool.

    Returns out [B, T, HV, V] in `dtype` and the window that `commit` needs. Padding rows give zeros.
    """
    hv, v_dim, k_dim = initial_state.shape[1:]
    s = prepare(
        mixed_qkv, a, b, A_log, dt_bias, scale, hv, v_dim, k_dim, use_qk_l2norm_in_kernel, is_kda, lower_bound,
        beta_scale, dtype,
    )  # fmt: skip
    pools = Pools(initial_state, d_cache, k_cache, g_cache)
    out, d_all = s.v.new_zeros(s.v.shape), s.v.new_zeros(s.v.shape)
    for row, (slot, n) in enumerate(zip(ssm_state_indices.tolist(), write_pos.tolist(), strict=True)):
        if slot < 0:
            continue
        start = folded(
            initial_state[slot].to(dtype), read_records(pools, slot, n, use_qk_l2norm_in_kernel, dtype)
        )  # fmt: skip
        q, k, v, g, beta = (x[row].transpose(0, 1) for x in s[:5])  # [HV, T, ·], beta [HV, T]
        beta = beta.unsqueeze(-1)
        decay = decay_between(g)  # [HV, T (now), T (from), 1 or K]
        since = torch.exp(g.cumsum(1))  # from the start of the window to each token, its own step included
        read_q, read_k = ((since * x) @ start.mT for x in (q, k))
        kk = torch.einsum("htjc,htc,hjc->htj", decay.expand(*decay.shape[:3], k_dim), k, k)
        qk = torch.einsum("htjc,htc,hjc->htj", decay.expand(*decay.shape[:3], k_dim), q, k)
        lower = torch.eye(k.shape[1], dtype=dtype, device=k.device) + (beta * kk).tril(-1)
        d = torch.linalg.solve_triangular(lower, beta * (v - read_k), upper=False, unitriangular=True)
        out[row] = (read_q + qk.tril() @ d).transpose(0, 1)
        d_all[row] = d.transpose(0, 1)
    return out, Window(d_all, s.k_raw, s.g, s.k)


def decay_between(g: Tensor) -> Tensor:
    """e^{G_i - G_j} for j <= i, 0 above the diagonal: [HV, T, T, 1 or K] from per-step g [HV, T, ·]."""
    heads, t, dim = g.shape
    out = g.new_zeros(heads, t, t, dim)
    for i in range(t):
        for j in range(i + 1):
            out[:, i, j] = torch.exp(g[:, j + 1 : i + 1].sum(1))
    return out


def commit(
    window: Window,
    accepted: Tensor,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Pools]:
    """Keep the first `accepted` tokens [B] of each row. Returns the new cursors [B] int32 and the new pools.

    They are appended where they leave the ring short of full, else checkpoint, ring and they are folded. The rest of
    the window leaves no trace.
    """
    before = Pools(initial_state, d_cache, k_cache, g_cache)
    after = Pools(*(p.clone() for p in before))
    ring_len, cursors = d_cache.shape[2], write_pos.clone()
    rows = zip(ssm_state_indices.tolist(), write_pos.tolist(), accepted.tolist(), strict=True)
    for row, (slot, n, count) in enumerate(rows):
        if slot < 0:
            cursors[row] = 0
            continue
        cursors[row] = advance_cursor(n, ring_len, num_tokens=count)
        if n + count < ring_len:
            for t in range(count):
                write_record(after, slot, n + t, window.d[row, t], window.k_raw[row, t], window.g[row, t])
            continue
        old = read_records(before, slot, n, use_qk_l2norm_in_kernel, dtype)
        new = (x[row, :count].transpose(0, 1) for x in (window.d, window.k, window.g))
        records = Records(*(torch.cat(pair, 1) for pair in zip(old, new, strict=True)))
        after.initial_state[slot] = folded(initial_state[slot].to(dtype), records).to(initial_state.dtype)
    return cursors, after


def flushes_early(pos: int, length: int, ring_len: int, force_flush: bool = False) -> bool:
    """Whether a row folds its ring before it appends a window of `length` tokens: else its ring might become full."""
    return force_flush or pos + length >= ring_len


def commit_cursor(pos: int, length: int, accepted: int, ring_len: int, force_flush: bool = False) -> int:
    """The cursor after `accepted` of `length` tokens were kept: they follow what was in the ring, or begin it."""
    return (0 if flushes_early(pos, length, ring_len, force_flush) else pos) + accepted


def ring_verify(
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
    lengths: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Pools]:
    """Arguments as the op `fused_recurrent_linear_replayssm_verify`, without `out`: rows of different lengths.

    Returns out [B, T, HV, V] in `dtype`, zero past a row's length, and the new pools. All records of a window are in
    the ring, whatever will be accepted of them; a row that flushes early has its old records in the checkpoint.
    """
    before = Pools(initial_state, d_cache, k_cache, g_cache)
    after = Pools(*(p.clone() for p in before))
    out = torch.zeros(*mixed_qkv.shape[:2], *initial_state.shape[1:3], dtype=dtype)
    for row, (slot, n, length) in enumerate(
        zip(ssm_state_indices.tolist(), write_pos.tolist(), lengths.tolist(), strict=True)
    ):
        if slot < 0:
            continue
        mine = slice(row, row + 1)
        out[mine, :length], window = verify(
            mixed_qkv[mine, :length], a[mine, :length], b[mine, :length], A_log, dt_bias, scale, initial_state, d_cache,
            k_cache, g_cache, ssm_state_indices[mine], write_pos[mine], use_qk_l2norm_in_kernel, is_kda, lower_bound,
            beta_scale, dtype,
        )  # fmt: skip
        first = n
        if flushes_early(n, length, d_cache.shape[2], force_flush is not None and bool(force_flush[row])):
            records = read_records(before, slot, n, use_qk_l2norm_in_kernel, dtype)
            if n:
                after.initial_state[slot] = folded(initial_state[slot].to(dtype), records).to(initial_state.dtype)
            first = 0
        for t in range(length):
            write_record(after, slot, first + t, window.d[0, t], window.k_raw[0, t], window.g[0, t])
    return out, after
