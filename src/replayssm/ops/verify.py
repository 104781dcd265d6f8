"""Verify: T tokens a row at once through a linear-attention layer, for drafts of which a part will be kept.

Formulas: docs/mathematics.md, section 5. What is kept of a window is said afterwards, by the operations of `commit`.

With a ring (`fused_recurrent_linear_replayssm_verify`), all records of the window go into the ring at once, and
`commit_cursors` moves the cursor past those that are kept: what was rejected is dead like any record past the cursor.
A window that might fill the ring folds it first, in the same launch. So one step of a model is

    gather_cursors → for each layer: causal_conv_verify, gdn_verify or kda_verify → commit_cursors, commit_conv

and a cursor is at most L - 1 between steps if T <= L - 1: then any row may take plain decode on the next step.
With T = L a window that is kept whole leaves a full ring, which `verify`, `flush` and `materialize` take, but not
decode.

Without one (`fused_recurrent_linear_packed_verify`), the checkpoint is the state, and it stays as it is: either a
snapshot after each token is written beside it (`commit_snapshot` copies one back), or nothing, and the inputs that
were kept are run again (`commit_kv_replay`).
"""

from __future__ import annotations

from torch import Tensor

from replayssm.ops import validate, windows
from replayssm.ops.library import OPS


def fused_recurrent_linear_replayssm_verify(
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
    lengths: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Outputs of a window from checkpoint and ring, in one pass; its records go into the ring. Returns `out`.

    With n = `write_pos` and m = `lengths` of a row: where n + m >= L, or its `force_flush` is not 0, ring[0:n] is
    folded into the checkpoint and the records go to ring[0:m]; else they go to ring[n:n+m]. Rows with slot < 0 are
    padding. The output is zero in padding rows and past the length of a row, where inputs are not looked at.

    Args:
        mixed_qkv: [B, T, 2·H·K + HV·V] fp32, bf16 or fp16: q, k, v after the conv, 1 <= T <= L; strides of B and T
            are free.
        a: gate input before softplus, GDN [B, T, HV], KDA [B, T, HV, K]; any stride.
        b: beta input before sigmoid [B, T, HV]; any stride.
        A_log: see `fused_recurrent_linear_replayssm_decode`, as all that is not said here.
        dt_bias: see there.
        scale: see there.
        initial_state: [slots, HV, V, K], written in rows that flush.
        d_cache: ring [slots, HV, L, V] fp32, in place.
        k_cache: ring [slots, H, L, K] in the dtype of mixed_qkv, in place.
        g_cache: ring, GDN [slots, HV, L], KDA [slots, HV, L, K], fp32, in place.
        out: [B, T, HV, V], any of the three dtypes; every element is written.
        ssm_state_indices: slots [B] int32, live ones distinct.
        write_pos: cursor of each row [B] int32, 0 … L, see `gather_cursors`.
        lengths: tokens of each row [B] int32, 0 … T: 1 in a row without drafts.
        force_flush: [B] int32 or None.
        use_qk_l2norm_in_kernel: see there.
        is_kda: see there.
        lower_bound: see there.
        beta_scale: see there.

    Raises:
        ShapeError: also for T > L. DtypeError, DeviceError, LayoutError, RingLengthError, OptionError: before
            anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    rows, tokens, h = windows.inputs(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, is_kda)
    windows.output(out, mixed_qkv, initial_state)
    ring_len = validate.ring(initial_state, d_cache, k_cache, g_cache, h, is_kda)
    windows.fits_ring(tokens, ring_len)
    windows.ring_dtype(k_cache, mixed_qkv)
    windows.counts(initial_state, rows, write_pos=write_pos, lengths=lengths, force_flush=force_flush)
    scale = validate.gate_options(scale, is_kda, lower_bound, beta_scale, initial_state.shape[3])
    if rows:
        OPS.replay_verify(
            mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
            write_pos, lengths, force_flush, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
        )  # fmt: skip
    return out


def fused_recurrent_linear_packed_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    snapshots: Tensor | None,
    out: Tensor,
    ssm_state_indices: Tensor,
    lengths: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Outputs of a window by the recurrence, token after token, from states that stay as they are. Returns `out`.

    Arguments and errors as in `fused_recurrent_linear_replayssm_verify`, without the ring. The state is fp32 from
    the first token of a window to the last, whatever it is stored in.

    Args:
        mixed_qkv: see there, as all that is not said here; T <= 64.
        a: see there.
        b: see there.
        A_log: see there.
        dt_bias: see there.
        scale: see there.
        initial_state: [slots, HV, V, K]; the slots of the rows have no records. Read only.
        snapshots: [B, T, HV, V, K] in the dtype of initial_state: the state after each token of a row; not written in
            padding rows and past the length of a row. None: nothing is kept, see `commit_kv_replay`.
        out: see there.
        ssm_state_indices: see there.
        lengths: see there.
        use_qk_l2norm_in_kernel: see there.
        is_kda: see there.
        lower_bound: see there.
        beta_scale: see there.
    """
    rows, tokens, _ = windows.inputs(mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, is_kda)
    windows.output(out, mixed_qkv, initial_state)
    if snapshots is not None:
        want = (rows, tokens, *initial_state.shape[1:])
        validate.shape("snapshots", snapshots, want, "B and T of mixed_qkv, HV, V and K of initial_state")
        validate.dtype("snapshots", snapshots, (initial_state.dtype,))
        validate.dense_inner("snapshots", snapshots, 2)
    windows.counts(initial_state, rows, lengths=lengths)
    validate.same_device("initial_state", initial_state, snapshots=snapshots)
    scale = validate.gate_options(scale, is_kda, lower_bound, beta_scale, initial_state.shape[3])
    if rows:
        OPS.packed_verify(
            mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, snapshots, out, ssm_state_indices, lengths,
            use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
        )  # fmt: skip
    return out


def gdn_verify(
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
    lengths: Tensor,
    force_flush: Tensor | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Gated DeltaNet window on a ring; see `fused_recurrent_linear_replayssm_verify`."""
    return fused_recurrent_linear_replayssm_verify(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, lengths, force_flush, beta_scale=beta_scale,
    )  # fmt: skip


def kda_verify(
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
    lengths: Tensor,
    force_flush: Tensor | None = None,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Kimi Delta Attention window on a ring; see `fused_recurrent_linear_replayssm_verify`."""
    return fused_recurrent_linear_replayssm_verify(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, lengths, force_flush, is_kda=True, lower_bound=lower_bound, beta_scale=beta_scale,
    )  # fmt: skip
