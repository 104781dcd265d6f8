"""Decode: one token a row through a linear-attention layer, with a replay ring or packed.

Formulas: docs/mathematics.md. H key heads, HV value heads (H | HV), K, V <= 256, L the ring length (1 … 64).
"""

from __future__ import annotations

from torch import Tensor

from replayssm.errors import DtypeError
from replayssm.ops import validate
from replayssm.ops.library import OPS


def fused_recurrent_linear_replayssm_decode(
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
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """One replay step: read checkpoint and ring, write the output, append a record or fold the ring. Returns `out`.

    A row folds when `write_pos == L - 1` or its `force_flush` is not 0, else it appends at `write_pos`. Rows with
    slot < 0 are padding: their output is zero and nothing else is touched. Live slots must be distinct.

    Args:
        mixed_qkv: [B, 2·H·K + HV·V] fp32, bf16 or fp16: q, k, v after the conv; the row stride is free.
        a: gate input before softplus, GDN [B, HV], KDA [B, HV, K]; any stride.
        b: beta input before sigmoid [B, HV]; any stride.
        A_log: [HV]; used in fp32.
        dt_bias: GDN [HV], KDA [HV, K]; used in fp32.
        scale: factor of q; None means K**-0.5.
        initial_state: checkpoints [slots, HV, V, K] fp32, bf16 or fp16, in place. The slot stride is free.
        d_cache: ring [slots, HV, L, V] fp32, in place. Its content is private to the ops, as is that of the next two.
        k_cache: ring [slots, H, L, K] in the dtype of mixed_qkv, in place.
        g_cache: ring, GDN [slots, HV, L], KDA [slots, HV, L, K], fp32, in place.
        out: [B, 1, HV, V], any of the three dtypes; every row is written.
        ssm_state_indices: slots [B] int32.
        write_pos: cursor of each row [B] int32, see `gather_cursors`.
        force_flush: [B] int32 or None.
        use_qk_l2norm_in_kernel: normalise q and k over K (eps 1e-6).
        is_kda: decay per key channel instead of per head.
        lower_bound: < 0 for the bounded KDA gate.
        beta_scale: factor of sigmoid(b); 2 where beta lies in (0, 2).

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, RingLengthError, OptionError: before anything is written.
        SlotError: for index values; off the CPU only while `debug_checks` are on.
    """
    rows, h = validate.inputs(mixed_qkv, a, b, A_log, dt_bias, initial_state, out, ssm_state_indices, is_kda)
    validate.ring(initial_state, d_cache, k_cache, g_cache, h, is_kda)
    if k_cache.dtype != mixed_qkv.dtype:
        raise DtypeError(
            f"k_cache has dtype {str(k_cache.dtype)[6:]}, but mixed_qkv has {str(mixed_qkv.dtype)[6:]}; "
            f"allocate the ring with io_dtype={str(mixed_qkv.dtype)[6:]!r}"
        )
    validate.indices("write_pos", write_pos, rows, "one cursor for each row; gather it with gather_cursors")
    if force_flush is not None:
        validate.indices("force_flush", force_flush, rows, "one flag for each row")
    validate.same_device("initial_state", initial_state, write_pos=write_pos, force_flush=force_flush)
    scale = validate.gate_options(scale, is_kda, lower_bound, beta_scale, initial_state.shape[3])
    if rows:
        OPS.replay_decode(
            mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
            write_pos, force_flush, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
        )  # fmt: skip
    return out


def fused_recurrent_linear_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    is_kda: bool = False,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """One ordinary step: every live row reads and writes its whole state. Returns `out`.

    Arguments and errors as in `fused_recurrent_linear_replayssm_decode`, without the ring.
    """
    rows, _ = validate.inputs(mixed_qkv, a, b, A_log, dt_bias, initial_state, out, ssm_state_indices, is_kda)
    scale = validate.gate_options(scale, is_kda, lower_bound, beta_scale, initial_state.shape[3])
    if rows:
        OPS.packed_decode(
            mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel,
            is_kda, lower_bound, beta_scale,
        )  # fmt: skip
    return out


def gdn_decode(
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
    force_flush: Tensor | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Gated DeltaNet replay step; see `fused_recurrent_linear_replayssm_decode`."""
    return fused_recurrent_linear_replayssm_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, force_flush, beta_scale=beta_scale,
    )  # fmt: skip


def kda_decode(
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
    force_flush: Tensor | None = None,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Kimi Delta Attention replay step; see `fused_recurrent_linear_replayssm_decode`."""
    return fused_recurrent_linear_replayssm_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, force_flush, is_kda=True, lower_bound=lower_bound, beta_scale=beta_scale,
    )  # fmt: skip


def gdn_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    beta_scale: float = 1.0,
) -> Tensor:
    """Gated DeltaNet packed step; see `fused_recurrent_linear_packed_decode`."""
    return fused_recurrent_linear_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, beta_scale=beta_scale
    )


def kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Kimi Delta Attention packed step; see `fused_recurrent_linear_packed_decode`."""
    return fused_recurrent_linear_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, is_kda=True,
        lower_bound=lower_bound, beta_scale=beta_scale,
    )  # fmt: skip
