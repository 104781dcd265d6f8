"""The ring of the torch backend: reading records, folding them into checkpoints, `flush` and `materialize`.

Content: d fp32; k raw in the activation dtype and normalised again on reading, which is exact where a rounded
normalised k is not; g the log decay of the record's own step. Rows at or past the cursor may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.kernels.torch_math import decay_weights, l2norm
from replayssm.kernels.torch_rows import (
    Run,
    consecutive,
    gather,
    heads,
    live_rows,
    run_slice,
    runs,
    slots_joined,
    store,
)


class Ring(NamedTuple):
    """d [slots, HV, L, V], k [slots, H, L, K], g [slots, HV, L] or [slots, HV, L, K]."""

    d: Tensor
    k: Tensor
    g: Tensor


class Records(NamedTuple):
    """n valid records of each row, fp32; a row with fewer has zeros in their place.

    d [rows·HV, n, V], k̂ [rows, H, n, K], decay [rows·HV, n + 1, 1 or K] as `decay_weights` returns it.
    """

    d: Tensor
    k: Tensor
    decay: Tensor

    @property
    def depth(self) -> int:
        """The longest row's number of records."""
        return self.d.shape[1]

    def part(self, run: Run) -> Records:
        """The records of one run of rows."""
        hv = self.d.shape[0] // self.k.shape[0]
        heads_of = run_slice(run, hv)
        return Records(self.d[heads_of], self.k[run.row : run.row + run.length], self.decay[heads_of])

    def weighted_k(self) -> Tensor:
        """k̂ of every value head, decayed to now: [rows·HV, n, K]."""
        rows, h, n, dim = self.k.shape
        w = self.decay[:, 1:].reshape(rows, h, -1, n, self.decay.shape[-1])
        return (self.k.unsqueeze(2) * w).view(-1, n, dim)


def read_records(ring: Ring, slots: list[int], pos: list[int], g_now: Tensor | None, use_l2norm: bool) -> Records:
    """Records 0 … pos-1 of each slot. At least one `pos` is > 0."""
    n = max(pos)
    d, k, g = (gather(t.narrow(2, 0, n), slots) for t in ring)
    k = k.float()
    if min(pos) < n:
        # Select, never multiply: a dead record may be NaN.
        dead = torch.arange(n, device=d.device) >= torch.tensor(pos, device=d.device).unsqueeze(1)
        dead = dead.view(-1, 1, n, 1)
        d, k = d.masked_fill(dead, 0), k.masked_fill(dead, 0)
        g = g.masked_fill(dead if g.ndim == 4 else dead.squeeze(-1), 0)
    if use_l2norm:
        k = l2norm(k)
    g = g.reshape(-1, *g.shape[2:])
    return Records(d.reshape(-1, n, d.shape[-1]), k, decay_weights(g, None if g_now is None else g_now.flatten(0, 1)))


def append(ring: Ring, slots: list[int], pos: list[int], d: Tensor, k_raw: Tensor, g: Tensor) -> None:
    """Write the record of each row at its own position; d [rows, HV, V], k_raw [rows, H, K], g as the gate."""
    if min(pos) == max(pos) and consecutive(slots):
        for cache, value in zip(ring, (d, k_raw, g), strict=True):
            cache.narrow(0, slots[0], len(slots)).select(2, pos[0]).copy_(value)
        return
    slot_index, pos_index = torch.tensor(slots, device=d.device), torch.tensor(pos, device=d.device)
    for cache, value in zip(ring, (d, k_raw, g), strict=True):
        cache[slot_index, :, pos_index] = value


def fold(state: Tensor, records: Records | None, decay: Tensor, d: Tensor | None, k: Tensor | None) -> None:
    """In place on fp32 [heads, V, K]: state·decay + Σ_j d_j (w_j ∘ k̂_j)ᵀ + d k̂ᵀ, all in fp32.

    decay [heads, 1, 1 or K]; `d` [heads, V] and `k` [heads, K] are the current token's, or None in a bare flush.
    """
    state.mul_(decay)
    if records is None:
        if d is not None and k is not None:
            state.addcmul_(d.unsqueeze(-1), k.unsqueeze(-2))
        return
    ring_d, ring_k = records.d, records.weighted_k()
    if d is not None and k is not None:
        ring_d = torch.cat([ring_d, d.unsqueeze(1)], 1)
        ring_k = torch.cat([ring_k, k.unsqueeze(1)], 1)
    state.baddbmm_(ring_d.mT, ring_k)


def flush(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> None:
    """Fold ring[0:write_pos] of each row into its checkpoint; an optional leading layer axis on the pools."""
    rows = live_rows(ssm_state_indices)
    todo = [(slot, p) for slot, p in zip(rows.slots, rows.pick(write_pos.tolist()), strict=True) if p > 0]
    if not todo:
        return
    slots, pos = [slot for slot, _ in todo], [p for _, p in todo]
    for state, *ring in _layers(initial_state, d_cache, k_cache, g_cache):
        records = read_records(Ring(*ring), slots, pos, None, use_qk_l2norm_in_kernel)
        for run in runs(slots, [True] * len(slots), slots_joined(state)):
            view = heads(state, run)
            work = view.float()
            part = records.part(run)
            fold(work, part, part.decay[:, :1], None, None)
            if work is not view:
                store(view, work)


def materialize(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    src_indices: Tensor,
    write_pos: Tensor,
    dst_state: Tensor,
    dst_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> None:
    """Write the folded state of each source slot to its destination slot; the source stays as it is."""
    pairs = zip(src_indices.tolist(), dst_indices.tolist(), write_pos.tolist(), strict=True)
    todo = [(src, dst, p) for src, dst, p in pairs if src >= 0 and dst >= 0]
    pending = [t for t in todo if t[2] > 0]
    slots, pos = [t[0] for t in pending], [t[2] for t in pending]
    for state, d, k, g, target in _layers(initial_state, d_cache, k_cache, g_cache, dst_state):
        for src, dst, p in todo:
            if p == 0:  # no record: a copy, exact to the bit where the dtypes agree
                store(target[dst], state[src])
        if not pending:
            continue
        records = read_records(Ring(d, k, g), slots, pos, None, use_qk_l2norm_in_kernel)
        for i, (src, dst, _) in enumerate(pending):  # one state at a time bounds the scratch memory
            work = state[src].to(torch.float32, copy=True)
            part = records.part(Run(i, src, 1, True))
            fold(work, part, part.decay[:, :1], None, None)
            store(target[dst], work)


def _layers(*pools: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The pools of one layer after the other; pools without a layer axis are one layer."""
    return zip(*pools, strict=True) if pools[0].ndim == 5 else iter([pools])
