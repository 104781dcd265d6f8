"""One decode step of the torch backend, with a ring (replay) or without (packed).

Per value head, from checkpoint S₀ and the records (d_j, k̂_j, w_j = decay of record j to now), for x = k̂ and q̂:
    S⁻x = S₀(decay ∘ x) + Σ_j d_j·⟨w_j ∘ k̂_j, x⟩      d = β(v − S⁻k̂)      o = S⁻q̂ + d·(k̂·q̂)
so the state is read once and written only by rows that flush. Packed decode is the case with no record in which
every row flushes. All sums are fp32. Formulas: docs/mathematics.md.

The row decisions are made on the host, which costs nothing on a CPU. On a GPU this code is correct but slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.kernels.torch_math import l2norm, log_decay
from replayssm.kernels.torch_ring import Records, Ring, append, fold, read_records
from replayssm.kernels.torch_rows import Rows, heads, live_rows, run_slice, runs, slots_joined, store


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
    pos = rows.pick(write_pos.tolist())
    last = d_cache.shape[2] - 1
    if force_flush is None:
        flush = [p == last for p in pos]
    else:
        flush = [p == last or f != 0 for p, f in zip(pos, rows.pick(force_flush.tolist()), strict=True)]
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
    rows = live_rows(ssm_state_indices)
    n = len(rows.slots)
    _step(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, None, out, rows, [0] * n, [True] * n,
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
    pos: list[int],
    flush: list[bool],
    use_l2norm: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    if rows.live is not None:
        out.zero_()
    n = len(rows.slots)
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
    if ring is not None and max(pos) > 0:
        records = read_records(ring, rows.slots, pos, g, use_l2norm)
        decay = records.decay[:, :1]
    else:
        decay = g.exp().reshape(n * hv, 1, -1)

    x = x.transpose(1, 2)  # [n, H, (q, k), K]
    y = _ring_readout(records, x, n * hv, v_dim)
    x = (x.unsqueeze(2) * decay.view(n, h, hv // h, 1, -1)).reshape(n * hv, 2, k_dim)

    loaded = []
    for run in runs(rows.slots, flush, slots_joined(state)):
        view = heads(state, run)
        work = view.float()  # the view itself for an fp32 state
        part = run_slice(run, hv)
        y[part].baddbmm_(x[part], work.mT)
        if run.flush:
            loaded.append((run, view, work))

    y = y.view(n, hv, 2, v_dim)
    d = torch.sub(qkv.narrow(1, 2 * h * k_dim, hv * v_dim).view(n, hv, v_dim), y[:, :, 1]).mul_(beta.unsqueeze(-1))
    o = torch.addcmul(y[:, :, 0], d, _per_value_head(kq, hv).unsqueeze(-1))
    if rows.where is None:
        out.select(1, 0).copy_(o)
    else:
        out.select(1, 0).index_copy_(0, rows.where, o.to(out.dtype))

    if loaded:
        d_heads, k_heads = d.reshape(n * hv, v_dim), _per_value_head(k, hv).reshape(n * hv, k_dim)
        for run, view, work in loaded:
            part = run_slice(run, hv)
            fold(work, records and records.part(run), decay[part], d_heads[part], k_heads[part])
            if work is not view:
                store(view, work)
    if ring is not None:
        _append(ring, rows.slots, pos, flush, d, qkv.narrow(1, h * k_dim, h * k_dim).view(n, h, k_dim), g)


def _ring_readout(records: Records | None, x: Tensor, heads_total: int, v_dim: int) -> Tensor:
    """Σ_j d_j·⟨w_j ∘ k̂_j, x⟩ for both x: [rows·HV, 2, V]; x is [rows, H, 2, K]."""
    if records is None:
        return x.new_zeros(heads_total, 2, v_dim)
    rows, h, _, k_dim = x.shape
    n = records.depth
    if records.decay.shape[-1] == 1:
        # One decay per head: the dot products are shared by the value heads of a key head.
        dots = torch.matmul(x, records.k.mT).unsqueeze(2)
        coef = (dots * records.decay[:, 1:, 0].view(rows, h, -1, 1, n)).view(-1, 2, n)
    else:
        x = x.unsqueeze(2).expand(rows, h, heads_total // (rows * h), 2, k_dim).reshape(-1, 2, k_dim)
        coef = torch.bmm(x, records.weighted_k().mT)
    return torch.bmm(coef, records.d)


def _append(
    ring: Ring, slots: list[int], pos: list[int], flush: list[bool], d: Tensor, k_raw: Tensor, g: Tensor
) -> None:
    keep = [i for i, f in enumerate(flush) if not f]
    if not keep:
        return
    if len(keep) < len(slots):
        index = torch.tensor(keep, device=d.device)
        d, k_raw, g = (t.index_select(0, index) for t in (d, k_raw, g))
        slots, pos = [slots[i] for i in keep], [pos[i] for i in keep]
    append(ring, slots, pos, d, k_raw, g)


def _per_value_head(x: Tensor, hv: int) -> Tensor:
    """[rows, H, …] to [rows, HV, …]: value head hv uses key head hv // (HV / H)."""
    ratio = hv // x.shape[1]
    return x if ratio == 1 else x.repeat_interleave(ratio, 1)
