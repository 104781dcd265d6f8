"""The ring outside decode: fold it (`flush`, `materialize`), move its cursor, and say when it must be folded."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.errors import DtypeError, OptionError, ShapeError
from replayssm.ops import validate
from replayssm.ops.library import OPS
from replayssm.spec import check_ring_len


def flush(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
) -> None:
    """Fold ring[0:write_pos] into the checkpoint of each row, in place, for all layers of the pools given.

    The cursor belongs to all layers of a slot, so the caller resets it to 0 after the last of them. Rows with slot
    < 0 or an empty ring touch nothing. The ring itself is not written.

    Args:
        initial_state: [slots, HV, V, K] or [layers, slots, HV, V, K], fp32, bf16 or fp16.
        d_cache: [(layers,) slots, HV, L, V] fp32.
        k_cache: [(layers,) slots, H, L, K].
        g_cache: GDN [(layers,) slots, HV, L], KDA [(layers,) slots, HV, L, K], fp32; its axes tell the kind.
        ssm_state_indices: slots [N] int32, distinct.
        write_pos: records of each row [N] int32, 0 … L.
        use_qk_l2norm_in_kernel: as in the decode that wrote the ring.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, RingLengthError: before anything is written.
    """
    _check_pools(initial_state, d_cache, k_cache, g_cache)
    _check_rows(initial_state, ssm_state_indices=ssm_state_indices, write_pos=write_pos)
    if ssm_state_indices.shape[0]:
        OPS.flush(initial_state, d_cache, k_cache, g_cache, ssm_state_indices, write_pos, use_qk_l2norm_in_kernel)


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
) -> None:
    """Write checkpoint + ring[0:write_pos] of each source slot, folded, to its destination slot.

    The source keeps its checkpoint, ring and cursor; the destination has an empty ring, so its cursor must be 0.
    Pairs with a slot < 0 are skipped. A source may be named twice, a destination only once.

    Args:
        initial_state: source pool, as the ring caches and `use_qk_l2norm_in_kernel` see `flush`.
        d_cache: see `flush`.
        k_cache: see `flush`.
        g_cache: see `flush`.
        src_indices: slots of `initial_state` [N] int32.
        write_pos: records of each source [N] int32, 0 … L.
        dst_state: [(layers,) slots', HV, V, K], fp32, bf16 or fp16; may be `initial_state` itself when no slot is
            both source and destination.
        dst_indices: slots of `dst_state` [N] int32, distinct.
        use_qk_l2norm_in_kernel: as in the decode that wrote the ring.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, RingLengthError: before anything is written.
    """
    layered = _check_pools(initial_state, d_cache, k_cache, g_cache)
    validate.state("dst_state", dst_state, layered)
    slot_axis = 1 if layered else 0
    want = list(initial_state.shape)
    want[slot_axis] = dst_state.shape[slot_axis]
    validate.shape("dst_state", dst_state, tuple(want), "initial_state, but for the slots")
    _check_rows(initial_state, src_indices=src_indices, write_pos=write_pos, dst_indices=dst_indices)
    validate.same_device("initial_state", initial_state, dst_state=dst_state)
    if src_indices.shape[0]:
        OPS.materialize(
            initial_state, d_cache, k_cache, g_cache, src_indices, write_pos, dst_state, dst_indices,
            use_qk_l2norm_in_kernel,
        )  # fmt: skip


def advance_cursors(
    cursor: Tensor,
    ssm_state_indices: Tensor,
    ring_len: int,
    force_flush: Tensor | None = None,
    num_tokens: Tensor | None = None,
) -> None:
    """Move the cursors of a batch on, in place, once per forward after the last layer. Never reads the device.

    next = 0 where the row flushed (`force_flush` != 0 or pos + n >= ring_len), else pos + n.

    Args:
        cursor: [slots] int32, one per physical slot, shared by all layers.
        ssm_state_indices: [B] int32, live slots distinct; padding rows (< 0) touch nothing.
        ring_len: L.
        force_flush: [B] int32, the same as the decode got, or None.
        num_tokens: n of each row [B] int32, or None for 1 (a window of several tokens is kept or folded whole).

    Raises:
        ShapeError, DtypeError, DeviceError, RingLengthError: before anything is written.
    """
    check_ring_len(ring_len)
    rows = _check_cursor(cursor, ssm_state_indices)
    for name, x in (("force_flush", force_flush), ("num_tokens", num_tokens)):
        if x is not None:
            validate.indices(name, x, rows, "one for each entry of ssm_state_indices")
    validate.same_device("cursor", cursor, force_flush=force_flush, num_tokens=num_tokens)
    if rows:
        OPS.advance_cursors(cursor, ssm_state_indices, ring_len, force_flush, num_tokens)


def gather_cursors(cursor: Tensor, ssm_state_indices: Tensor) -> Tensor:
    """Cursor of each row [B] int32, 0 for padding: the `write_pos` of a decode. Never reads the device.

    Args:
        cursor: [slots] int32.
        ssm_state_indices: [B] int32.
    """
    rows = _check_cursor(cursor, ssm_state_indices)
    return OPS.gather_cursors(cursor, ssm_state_indices) if rows else ssm_state_indices.new_empty(0)


def force_flush_mask(
    seq_lens: Tensor, interval: int, ssm_state_indices: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`force_flush` of a batch: 1 in rows that must fold on this step, so that a snapshot can be taken, else 0.

    A row must fold when its sequence, this step's token included, has a length that is a multiple of `interval`.
    Padding rows give 0. Never reads the device, so a CUDA graph may hold it. Give the result to every decode of the
    step and to `advance_cursors`.

    Args:
        seq_lens: [B] int32 or int64, tokens of each row after this step; below 1 counts as padding.
        interval: tokens between snapshots; 0 or less means never.
        ssm_state_indices: [B] int32, rows < 0 are padding; None when `seq_lens` says enough.
        out: [B] int32; allocated when None.

    Raises:
        ShapeError, DtypeError, DeviceError, OptionError: before anything is written.
    """
    validate.ndim("seq_lens", seq_lens, ("B",))
    validate.dtype("seq_lens", seq_lens, (torch.int32, torch.int64))
    rows = seq_lens.shape[0]
    if isinstance(interval, bool) or not isinstance(interval, int):
        raise OptionError(f"interval = {interval!r} must be an integer; 0 means never")
    if out is None:
        out = torch.empty(rows, dtype=torch.int32, device=seq_lens.device)
    for name, x in (("ssm_state_indices", ssm_state_indices), ("out", out)):
        if x is not None:
            validate.indices(name, x, rows, "one for each entry of seq_lens")
    validate.same_device("seq_lens", seq_lens, ssm_state_indices=ssm_state_indices, out=out)
    if rows:
        OPS.force_flush_mask(seq_lens, interval, ssm_state_indices, out)
    return out


def _check_cursor(cursor: Tensor, ssm_state_indices: Tensor) -> int:
    validate.ndim("cursor", cursor, ("slots",))
    if cursor.dtype != torch.int32:
        raise DtypeError.unsupported("cursor", cursor.dtype, (torch.int32,))
    validate.ndim("ssm_state_indices", ssm_state_indices, ("B",))
    rows = ssm_state_indices.shape[0]
    validate.indices("ssm_state_indices", ssm_state_indices, rows, "")
    validate.same_device("cursor", cursor, ssm_state_indices=ssm_state_indices)
    return rows


def _check_pools(initial_state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor) -> bool:
    layered = initial_state.ndim == 5
    validate.state("initial_state", initial_state, layered)
    if g_cache.ndim not in (d_cache.ndim - 1, d_cache.ndim):
        raise ShapeError(f"g_cache has {g_cache.ndim} axes, expected {d_cache.ndim - 1} (GDN) or {d_cache.ndim} (KDA)")
    validate.ring(initial_state, d_cache, k_cache, g_cache, None, None, layered)
    return layered


def _check_rows(initial_state: Tensor, **named: Tensor) -> None:
    first, lead = next(iter(named.items()))
    validate.ndim(first, lead, ("N",))
    for name, x in named.items():
        validate.indices(name, x, lead.shape[0], f"one for each entry of {first}")
    validate.same_device("initial_state", initial_state, **named)
