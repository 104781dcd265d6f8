"""A window of T tokens a row on a ring (torch backend): all outputs in one pass, all records into the ring.

Formulas: docs/mathematics.md, section 5. The state is read once, for 2T readouts. Rows that flush write it, folded up
to the window's start. All sums are fp32. All rows go through each tensor call together.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from replayssm.kernels.torch_ring import Records, Ring, extent, fold, read_records
from replayssm.kernels.torch_rows import Rows, live_rows, rounded
from replayssm.kernels.torch_window import Window, per_value_head, window


def replay_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    lengths: Tensor,
    force_flush: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """See `replayssm.ops.fused_recurrent_linear_replayssm_verify`."""
    rows = live_rows(ssm_state_indices)
    if rows.where is not None:
        out.zero_()
    if rows.length == 0:
        return
    pos, counts = rows.take(write_pos), rows.take(lengths)
    flush = pos + counts >= d_cache.shape[2]
    if force_flush is not None:
        flush |= rows.take(force_flush) != 0
    heads = initial_state.shape[1], initial_state.shape[2], initial_state.shape[3]
    w = window(
        rows, counts, mixed_qkv, a, b, A_log, dt_bias, scale, heads, use_qk_l2norm_in_kernel, is_kda, lower_bound,
        beta_scale,
    )  # fmt: skip
    ring = Ring(d_cache, k_cache, g_cache)
    low, high = extent(pos)
    records = read_records(ring, rows, pos, high, low == high, None, use_qk_l2norm_in_kernel) if high > 0 else None

    readouts = _readouts(rows, w, initial_state, records)
    d, o = _solved(w, *readouts)
    rows.put(out, o.transpose(1, 2).masked_fill(~w.alive[:, :, None, None], 0))

    folding = (flush & (pos > 0)).nonzero().squeeze(1)
    if records is not None and folding.shape[0]:
        slots, mine = rows.slots.index_select(0, folding), records.some(folding)
        part = initial_state.index_select(0, slots).float()
        fold(part.flatten(0, 1), mine, mine.decay[:, :, :1].flatten(0, 1), None, None)
        initial_state.index_copy_(0, slots, rounded(part, initial_state.dtype))
    _append(ring, rows, w, torch.where(flush, 0, pos), d.transpose(1, 2))


def _readouts(rows: Rows, w: Window, state: Tensor, records: Records | None) -> tuple[Tensor, Tensor]:
    """S(e^{γ_t} ∘ x_t) for x = q̂ and k̂, S the state at the window's start: two of [n, HV, T, V]."""
    _, hv, v_dim, k_dim = state.shape
    n, tokens = w.alive.shape
    since = w.g.cumsum(1).exp_().transpose(1, 2)  # from the window's start to token t, its own step included
    x = torch.cat([per_value_head(x, hv) * since for x in (w.q, w.k)], 2)  # [n, HV, 2T, K]
    if records is None:
        y, start = x.new_zeros(n * hv, 2 * tokens, v_dim), x
    else:
        coef = torch.matmul(x, records.weighted_k().mT)
        y = torch.bmm(coef.flatten(0, 1), records.d.flatten(0, 1))
        start = x * records.decay[:, :, :1]
    joined = rows.first is not None and state.stride(0) == hv * v_dim * k_dim
    work = rows.gather(state) if joined else state.index_select(0, rows.slots)
    y = y.baddbmm_(start.flatten(0, 1), work.float().view(n * hv, v_dim, k_dim).mT)
    read_q, read_k = y.view(n, hv, 2, tokens, v_dim).unbind(2)
    return read_q, read_k


def _solved(w: Window, read_q: Tensor, read_k: Tensor) -> tuple[Tensor, Tensor]:
    """d and o of all tokens [n, HV, T, V]: the tokens act on each other through a unit lower triangular system."""
    hv, tokens = read_q.shape[1:3]
    q, k = per_value_head(w.q, hv), per_value_head(w.k, hv)
    gates = w.g.transpose(1, 2)  # [n, HV, T, 1 or K]
    decay = torch.einsum("ijm,nhmc->nhijc", _steps_between(tokens, gates.device), gates).exp_()
    if decay.shape[-1] == 1:
        kk, qk = (torch.matmul(x, k.mT) * decay.squeeze(-1) for x in (k, q))
    else:
        weighted = decay * k.unsqueeze(2)
        kk, qk = (torch.matmul(weighted, x.unsqueeze(-1)).squeeze(-1) for x in (k, q))
    beta = w.beta.transpose(1, 2).unsqueeze(-1)
    d = beta * (w.v.transpose(1, 2) - read_k)
    if tokens > 1:
        d = torch.linalg.solve_triangular((beta * kk).tril(-1), d, upper=False, unitriangular=True)
    return d, read_q + torch.matmul(qk.tril(), d)


def _append(ring: Ring, rows: Rows, w: Window, first: Tensor, d: Tensor) -> None:
    """Records of all live tokens, from position `first` [n] on; d [n, T, HV, V]."""
    row, t = w.alive.nonzero(as_tuple=True)
    slots, at = rows.slots[row], first[row] + t
    g = w.g.squeeze(-1) if ring.g.ndim == 3 else w.g
    for cache, value in zip(ring, (d, w.k_raw, g), strict=True):
        cache[slots, :, at] = value[row, t]


@lru_cache(maxsize=64)
def _steps_between(tokens: int, device: torch.device) -> Tensor:
    """[T, T, T] of 0 and 1: (i, j) takes the steps m with j < m <= i."""
    with torch.inference_mode(False):
        i, j, m = torch.meshgrid(*[torch.arange(tokens, device=device)] * 3, indexing="ij")
        return ((j < m) & (m <= i)).float()
