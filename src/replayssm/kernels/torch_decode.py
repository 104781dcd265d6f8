"""One decode step of the torch backend, with a ring (replay) or without (packed).

Per value head, from checkpoint S₀ and the records (d_j, k̂_j, w_j = decay of record j to now), for x = k̂ and q̂:
    S⁻x = S₀(decay ∘ x) + Σ_j d_j·⟨w_j ∘ k̂_j, x⟩      d = β(v − S⁻k̂)      o = S⁻q̂ + d·(k̂·q̂)
so the state is read once and written only by rows that flush. Packed decode is the case with no record in which
every row flushes. All sums are fp32. Formulas: docs/mathematics.md.

All rows go through each tensor call together. Which rows flush is looked up on the host, which costs nothing on a CPU;
on a GPU this code is correct, but waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.kernels.torch_math import l2norm, log_decay
from replayssm.kernels.torch_ring import Records, Ring, append, extent, fold, read_records
from replayssm.kernels.torch_rows import Rows, live_rows, rounded


def replay_decode(
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
    force_flush: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """Replay decode: a row appends its record, or folds the ring when it is full or `force_flush` says so."""
    rows = live_rows(ssm_state_indices)
    pos = rows.take(write_pos)
    flush = pos == d_cache.shape[2] - 1
    if force_flush is not None:
        flush |= rows.take(force_flush) != 0
    _step(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, Ring(d_cache, k_cache, g_cache), out, rows, pos, flush,
        use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """Packed decode: every row reads and writes its whole state."""
    _step(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, None, out, live_rows(ssm_state_indices), None, None,
        use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def _step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    state: Tensor,
    ring: Ring | None,
    out: Tensor,
    rows: Rows,
    pos: Tensor | None,
    flush: Tensor | None,
    use_l2norm: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    if rows.where is not None:
        out.zero_()
    n = rows.length
    if n == 0:
        return
    _, hv, v_dim, k_dim = state.shape
    h = (mixed_qkv.shape[1] - hv * v_dim) // (2 * k_dim)
    qkv = rows.take(mixed_qkv)

    x = qkv.narrow(1, 0, 2 * h * k_dim).float().view(n, 2, h, k_dim)
    x = l2norm(x) if use_l2norm else x.clone()
    q, k = x.unbind(1)
    q.mul_(scale)
    kq = torch.linalg.vecdot(k, q)
    g = log_decay(rows.take(a), A_log, dt_bias, is_kda, lower_bound)
    beta = torch.sigmoid(rows.take(b).float())
    if beta_scale != 1.0:
        beta.mul_(beta_scale)

    records = None
    low, high = (0, 0) if pos is None else extent(pos)
    if ring is not None and pos is not None and high > 0:
        records = read_records(ring, rows, pos, high, low == high, g, use_l2norm)
        decay = records.decay[:, :, :1]
    else:
        decay = g.exp().view(n, hv, 1, -1)

    x = x.transpose(1, 2)  # [n, H, (q, k), K]
    y = _ring_readout(records, x, hv, v_dim)
    x = (x.unsqueeze(2) * decay.reshape(n, h, hv // h, 1, -1)).reshape(n * hv, 2, k_dim)
    # The pool itself for an fp32 state in consecutive slots, else a copy.
    joined = rows.first is not None and state.stride(0) == hv * v_dim * k_dim
    work = (rows.gather(state) if joined else state.index_select(0, rows.slots)).float()
    y = y.baddbmm_(x, work.view(n * hv, v_dim, k_dim).mT).view(n, hv, 2, v_dim)

    d = torch.sub(qkv.narrow(1, 2 * h * k_dim, hv * v_dim).view(n, hv, v_dim), y[:, :, 1]).mul_(beta.unsqueeze(-1))
    rows.put(out.select(1, 0), torch.addcmul(y[:, :, 0], d, _per_value_head(kq, hv).unsqueeze(-1)))

    folding, appending = _split(flush)
    if folding is not _NONE:
        part = work if folding is None else work.index_select(0, folding)
        fold(
            part.flatten(0, 1),
            records and records.some(folding),
            _some(decay, folding).flatten(0, 1),
            _some(d, folding),
            _some(_per_value_head(k, hv), folding),
        )
        if folding is not None or not joined or state.dtype != torch.float32:
            state.index_copy_(0, _some(rows.slots, folding), rounded(part, state.dtype))
    if ring is not None and pos is not None and appending is not _NONE:
        k_raw = qkv.narrow(1, h * k_dim, h * k_dim).view(n, h, k_dim)
        chosen = rows if appending is None else rows.some(appending)
        even = low == high  # where all rows stand at one place, those that append do too
        append(ring, chosen, _some(pos, appending), even, *(_some(t, appending) for t in (d, k_raw, g)))


# Marks an empty choice of rows, where None stands for all of them.
_NONE = torch.empty(0, dtype=torch.int64)


def _split(flush: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Rows that fold and rows that append: None for all, `_NONE` for none, else their numbers."""
    if flush is None:
        return None, _NONE
    folding = int(flush.sum())
    if folding == 0:
        return _NONE, None
    if folding == flush.shape[0]:
        return None, _NONE
    return flush.nonzero().squeeze(1), (~flush).nonzero().squeeze(1)


def _some(x: Tensor, which: Tensor | None) -> Tensor:
    return x if which is None else x.index_select(0, which)


def _ring_readout(records: Records | None, x: Tensor, hv: int, v_dim: int) -> Tensor:
    """Σ_j d_j·⟨w_j ∘ k̂_j, x⟩ for both x: [rows·HV, 2, V]; x is [rows, H, 2, K]."""
    rows, h, _, k_dim = x.shape
    if records is None:
        return x.new_zeros(rows * hv, 2, v_dim)
    n = records.depth
    if records.decay.shape[-1] == 1:
        # One decay per head: the dot products are shared by the value heads of a key head.
        dots = torch.matmul(x, records.k.mT).unsqueeze(2)
        coef = (dots * records.decay[:, :, 1:, 0].reshape(rows, h, -1, 1, n)).reshape(-1, 2, n)
    else:
        x = x.unsqueeze(2).expand(rows, h, hv // h, 2, k_dim).reshape(-1, 2, k_dim)
        coef = torch.bmm(x, records.weighted_k().flatten(0, 1).mT)
    return torch.bmm(coef, records.d.flatten(0, 1))


def _per_value_head(x: Tensor, hv: int) -> Tensor:
    """[rows, H, …] to [rows, HV, …]: value head hv uses key head hv // (HV / H)."""
    ratio = hv // x.shape[1]
    return x if ratio == 1 else x.repeat_interleave(ratio, 1)
