"""Commit: keep the first part of each window that was verified, for all layers of the pools given in one launch.

`accepted` [B] int32 counts the tokens of each row that are kept, 0 … its length: it is a result of sampling, so it
lies on the device, and nothing here reads it there. Rows with slot < 0 are padding and touch nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.errors import DtypeError, ShapeError
from replayssm.ops import validate, windows
from replayssm.ops.library import OPS
from replayssm.ops.ring import flush
from replayssm.spec import check_ring_len


def commit_cursors(
    cursor: Tensor,
    ssm_state_indices: Tensor,
    ring_len: int,
    lengths: Tensor,
    accepted: Tensor,
    force_flush: Tensor | None = None,
) -> None:
    """Move the cursors past what is kept of a window on a ring, in place, once per forward after the last layer.

    next = accepted where the row flushed (pos + length >= ring_len or `force_flush` != 0), else pos + accepted.

    Args:
        cursor: [slots] int32, one per physical slot, shared by all layers.
        ssm_state_indices: [B] int32, live slots distinct.
        ring_len: L.
        lengths: [B] int32, the same as the verify got.
        accepted: [B] int32.
        force_flush: [B] int32, the same as the verify got, or None.

    Raises:
        ShapeError, DtypeError, DeviceError, RingLengthError: before anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    check_ring_len(ring_len)
    validate.ndim("cursor", cursor, ("slots",))
    validate.dtype("cursor", cursor, (torch.int32,))
    validate.ndim("ssm_state_indices", ssm_state_indices, ("B",))
    rows = ssm_state_indices.shape[0]
    named = dict(ssm_state_indices=ssm_state_indices, lengths=lengths, accepted=accepted, force_flush=force_flush)
    for name, x in named.items():
        if x is not None:
            validate.indices(name, x, rows, "one for each entry of ssm_state_indices")
    validate.same_device("cursor", cursor, **named)
    if rows:
        OPS.commit_cursors(cursor, ssm_state_indices, ring_len, lengths, accepted, force_flush)


def commit_conv(conv_state: Tensor, window: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    """Push the first `accepted` inputs of each window into the conv state, in place.

    Args:
        conv_state: [slots, C, S] or [layers, slots, C, S], as in `causal_conv_verify`, which left it as it was.
        window: what that op had for `x`, [(layers,) B, T, C]; any stride.
        ssm_state_indices: [B] int32, live slots distinct.
        accepted: [B] int32.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError: before anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    rows, _, size = windows.conv("window", window, conv_state, ssm_state_indices, layered=conv_state.ndim == 4)
    validate.indices("accepted", accepted, rows, "one for each row of window")
    validate.same_device("window", window, accepted=accepted)
    if rows and size and conv_state.numel():
        OPS.commit_conv(conv_state, window, ssm_state_indices, accepted)


def commit_snapshot(initial_state: Tensor, snapshots: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    """Copy the state after the last token that is kept to its slot; rows that keep none stay as they are.

    Args:
        initial_state: [slots, HV, V, K] or [layers, slots, HV, V, K], in place.
        snapshots: [(layers,) B, T, HV, V, K], see `fused_recurrent_linear_packed_verify`.
        ssm_state_indices: [B] int32, live slots distinct.
        accepted: [B] int32.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError: before anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    layered = initial_state.ndim == 5
    head = validate.state("initial_state", initial_state, layered)
    validate.ndim("snapshots", snapshots, (*(("layers",) if layered else ()), "B", "T", "HV", "V", "K"))
    rows, tokens = snapshots.shape[-5:-3]
    want = (*((initial_state.shape[0],) if layered else ()), rows, tokens, *head)
    validate.shape("snapshots", snapshots, want, "layers, HV, V and K of initial_state")
    if snapshots.dtype != initial_state.dtype:
        raise DtypeError.unsupported("snapshots", snapshots.dtype, (initial_state.dtype,))
    validate.dense_inner("snapshots", snapshots, snapshots.ndim - 3)
    named = dict(ssm_state_indices=ssm_state_indices, accepted=accepted)
    for name, x in named.items():
        validate.indices(name, x, rows, "one for each row of snapshots")
    validate.same_device("initial_state", initial_state, snapshots=snapshots, **named)
    if rows and tokens:
        OPS.commit_snapshot(initial_state, snapshots, ssm_state_indices, accepted)


def commit_kv_replay(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    accepted: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> None:
    """Run the recurrence over the tokens that are kept and store the state after them, in place.

    The inputs are those that `fused_recurrent_linear_packed_verify` had, of one layer or of all layers.

    Args:
        mixed_qkv: [(layers,) B, T, 2·H·K + HV·V].
        a: GDN [(layers,) B, T, HV], KDA [(layers,) B, T, HV, K]; any stride.
        b: [(layers,) B, T, HV]; any stride.
        A_log: [(layers,) HV].
        dt_bias: GDN [(layers,) HV], KDA [(layers,) HV, K].
        initial_state: [(layers,) slots, HV, V, K]; its axes tell whether there are layers.
        ssm_state_indices: [B] int32, live slots distinct.
        accepted: [B] int32.
        use_qk_l2norm_in_kernel: as in the verify, as the next three.
        is_kda: see there.
        lower_bound: see there.
        beta_scale: see there.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, OptionError: before anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    layered = initial_state.ndim == 5
    rows, _, _ = windows.inputs(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, is_kda, layered)
    windows.counts(initial_state, rows, accepted=accepted)
    validate.gate_options(None, is_kda, lower_bound, beta_scale, initial_state.shape[-1])
    if rows:
        OPS.commit_kv_replay(
            mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, accepted, use_qk_l2norm_in_kernel,
            is_kda, lower_bound, beta_scale,
        )  # fmt: skip


def commit_fold(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    ssm_state_indices: Tensor,
    accepted: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
) -> None:
    """Fold the records that are kept into the states, in place; the tokens of a window side by side, not in turn.

    For windows that `fused_recurrent_linear_replayssm_verify` wrote with every `write_pos` 0, so that ring[0:T] holds
    the window alone: states are then complete after each commit, and the cursors stay 0. T may be L here. Since the
    records are d, which needs no earlier state, this is the sum of `flush` over the first `accepted` of them.

    Arguments and errors as in `flush`, with `accepted` for `write_pos`.
    """
    validate.ndim("accepted", accepted, ("B",))
    if accepted.shape != ssm_state_indices.shape:
        raise ShapeError.mismatch("accepted", tuple(accepted.shape), tuple(ssm_state_indices.shape), "one for each row")
    flush(initial_state, d_cache, k_cache, g_cache, ssm_state_indices, accepted, use_qk_l2norm_in_kernel)
