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
from replayssm.kernels.torch_rows import Rows, live_rows, rounded


class Ring(NamedTuple):
    """d [slots, HV, L, V], k [slots, H, L, K], g [slots, HV, L] or [slots, HV, L, K]."""

    d: Tensor
    k: Tensor
    g: Tensor


class Records(NamedTuple):
    """n valid records of each row, fp32; a row with fewer has zeros in their place.

    d [rows, HV, n, V], k̂ [rows, H, n, K], decay [rows, HV, n + 1, 1 or K] as `decay_weights` returns it.
    """

    d: Tensor
    k: Tensor
    decay: Tensor

    @property
    def depth(self) -> int:
        """n."""
        return self.d.shape[2]

    def some(self, which: Tensor | None) -> Records:
        """The records of some rows; of all for None."""
        return self if which is None else Records(*(x.index_select(0, which) for x in self))

    def weighted_k(self) -> Tensor:
        """k̂ of every value head, decayed to now: [rows, HV, n, K]."""
        rows, h, n, dim = self.k.shape
        w = self.decay[:, :, 1:].unflatten(1, (h, -1))
        return (self.k.unsqueeze(2) * w).view(rows, -1, n, dim)


def read_records(
    ring: Ring, rows: Rows, pos: Tensor, n: int, even: bool, g_now: Tensor | None, use_l2norm: bool
) -> Records:
    """Records 0 … pos-1 of each row, pos [rows]; n is the largest pos, at least 1; even: all rows have n."""
    d, k, g = (rows.gather(cache.narrow(2, 0, n)) for cache in ring)
    k = k.float()
    if not even:
        # Select, never multiply: a dead record may be NaN.
        dead = (torch.arange(n, device=pos.device) >= pos.unsqueeze(1)).view(-1, 1, n, 1)
        d, k = d.masked_fill(dead, 0), k.masked_fill(dead, 0)
        g = g.masked_fill(dead if g.ndim == 4 else dead.squeeze(-1), 0)
    if use_l2norm:
        k = l2norm(k)
    now = None if g_now is None else g_now.flatten(0, 1)
    decay = decay_weights(g.flatten(0, 1), now)
    return Records(d, k, decay.unflatten(0, g.shape[:2]))


def append(ring: Ring, rows: Rows, pos: Tensor, even: bool, d: Tensor, k_raw: Tensor, g: Tensor) -> None:
    """Write the record of each row at its own position; d [rows, HV, V], k_raw [rows, H, K], g as the gate.

    even: all positions are the same.
    """
    if even and rows.first is not None:
        at = int(pos[0])
        for cache, value in zip(ring, (d, k_raw, g), strict=True):
            rows.gather(cache).select(2, at).copy_(value)
        return
    for cache, value in zip(ring, (d, k_raw, g), strict=True):
        cache[rows.slots, :, pos] = value


def fold(state: Tensor, records: Records | None, decay: Tensor, d: Tensor | None, k: Tensor | None) -> None:
    """In place on fp32 [rows·HV, V, K]: state·decay + Σ_j d_j (w_j ∘ k̂_j)ᵀ + d k̂ᵀ, all in fp32.

    decay [rows·HV, 1, 1 or K]; `d` [rows, HV, V] and `k` [rows, HV, K] are the current token's, None in a flush.
    """
    state.mul_(decay)
    if records is None:
        assert d is not None
        assert k is not None
        state.addcmul_(d.reshape(*state.shape[:2], 1), k.reshape(-1, 1, state.shape[2]))
        return
    ring_d, ring_k = records.d, records.weighted_k()
    if d is not None and k is not None:
        ring_d = torch.cat([ring_d, d.unsqueeze(2)], 2)
        ring_k = torch.cat([ring_k, k.unsqueeze(2)], 2)
    state.baddbmm_(ring_d.flatten(0, 1).mT, ring_k.flatten(0, 1))


def extent(pos: Tensor) -> tuple[int, int]:
    """The smallest and the largest of the cursors."""
    low, high = pos.aminmax()
    return int(low), int(high)


def _folded(state: Tensor, ring: Ring, rows: Rows, pos: Tensor, use_l2norm: bool) -> Tensor:
    """The true states [rows, HV, V, K] fp32 of rows that all have records."""
    low, high = extent(pos)
    records = read_records(ring, rows, pos, high, low == high, None, use_l2norm)
    work = rows.gather(state).to(torch.float32, copy=True)
    fold(work.flatten(0, 1), records, records.decay[:, :, :1].flatten(0, 1), None, None)
    return work


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
    pos = rows.take(write_pos)
    rows, pos = _with_records(rows, pos)
    if rows.length == 0:
        return
    for state, *ring in _layers(initial_state, d_cache, k_cache, g_cache):
        work = _folded(state, Ring(*ring), rows, pos, use_qk_l2norm_in_kernel)
        state.index_copy_(0, rows.slots, rounded(work, state.dtype))


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
    rows = live_rows(torch.where(dst_indices >= 0, src_indices, -1))
    pos, dst = rows.take(write_pos), rows.take(dst_indices).long()
    clean = (pos <= 0).nonzero().squeeze(1)
    pending, pending_pos = _with_records(rows, pos)
    for state, d, k, g, target in _layers(initial_state, d_cache, k_cache, g_cache, dst_state):
        if clean.shape[0]:  # no record: a copy, exact to the bit where the dtypes agree
            part = state.index_select(0, rows.slots[clean])
            target.index_copy_(0, dst[clean], rounded(part, target.dtype))
        if pending.length:
            work = _folded(state, Ring(d, k, g), pending, pending_pos, use_qk_l2norm_in_kernel)
            target.index_copy_(0, pending.take(dst), rounded(work, target.dtype))


def _with_records(rows: Rows, pos: Tensor) -> tuple[Rows, Tensor]:
    """The rows whose ring is not empty, renumbered among `rows`."""
    if bool((pos > 0).all()):
        return rows._replace(where=None), pos
    pending = rows.some((pos > 0).nonzero().squeeze(1))
    return pending, pending.take(pos)


def _layers(*pools: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The pools of one layer after the other; pools without a layer axis are one layer."""
    return zip(*pools, strict=True) if pools[0].ndim == 5 else iter([pools])
