"""`flush` and `materialize`: fold the ring of many slots, and of all layers, in one launch."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import OPTIONS, UNROLL, fold_tile, on_device
from replayssm.kernels.triton.tiles import columns, decayed, fold_records, load_state, store_state


@triton.jit
def fold_kernel(
    state_ptr, d_ptr, k_ptr, g_ptr, src_ptr, pos_ptr, dst_state_ptr, dst_ptr, num_rows,
    state_layer, d_layer, k_layer, g_layer, dst_layer, state_slot, d_slot, k_slot, g_slot, dst_slot,
    src_step, pos_step, dst_step,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    L2NORM: tl.constexpr, IS_KDA: tl.constexpr, IN_PLACE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid: layers x rows x HV x TILES, on one axis. IN_PLACE: an empty ring leaves its state alone."""
    pid = tl.program_id(0)
    first = pid % TILES * BV
    rows = first + tl.arange(0, BV)
    head = pid // TILES % HV
    entry = pid // (TILES * HV)
    row = (entry % num_rows).to(tl.int64)
    layer = (entry // num_rows).to(tl.int64)
    src = tl.load(src_ptr + row * src_step).to(tl.int64)
    dst = tl.load(dst_ptr + row * dst_step).to(tl.int64)
    if (src < 0) | (dst < 0):
        return
    n = tl.load(pos_ptr + row * pos_step)
    if IN_PLACE and n <= 0:
        return

    cols = columns(BK, BC)
    acc = tl.zeros([BK // BC, BV, BC], tl.float32)
    if IS_KDA:
        total = tl.zeros([BK // BC, BC], tl.float32)
    else:
        total = tl.zeros([], tl.float32)
    acc, total = fold_records(
        acc, total,
        d_ptr + layer * d_layer + src * d_slot + head * (L * V),
        k_ptr + layer * k_layer + src * k_slot + head // (HV // H) * (L * K),
        g_ptr + layer * g_layer + src * g_slot + head * (L * K if IS_KDA else L),
        n, rows, cols, K, V, L2NORM, IS_KDA, UNROLL,
    )  # fmt: skip
    s = load_state(
        state_ptr + layer * state_layer + src * state_slot + head * (V * K), first, K, V, BV, BK, BC, VEC, EVEN
    ).to(tl.float32)
    if n > 0:  # else a copy, exact to the sign of a zero
        s = decayed(s, total, IS_KDA) + acc
    dst_at = dst_state_ptr + layer * dst_layer + dst * dst_slot + head * (V * K)
    store_state(dst_at, s, first, K, V, BV, BK, BC, VEC, EVEN)


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
    _launch(
        initial_state, d_cache, k_cache, g_cache, ssm_state_indices, write_pos, initial_state, ssm_state_indices,
        use_qk_l2norm_in_kernel, True,
    )  # fmt: skip


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
    _launch(
        initial_state, d_cache, k_cache, g_cache, src_indices, write_pos, dst_state, dst_indices,
        use_qk_l2norm_in_kernel, False,
    )  # fmt: skip


def _launch(
    state: Tensor, d: Tensor, k: Tensor, g: Tensor, src: Tensor, pos: Tensor, dst_state: Tensor, dst: Tensor,
    use_l2norm: bool, in_place: bool,
) -> None:  # fmt: skip
    is_kda = g.ndim == d.ndim
    layers = state.shape[0] if state.ndim == 5 else 1
    rows, (hv, v_dim, k_dim) = src.shape[0], state.shape[-3:]
    if not rows or not layers:
        return
    tile = fold_tile(v_dim, k_dim)
    pools = (state, d, k, g, dst_state)
    # The slot axis is the last but three, but for g of GDN, which has no axis after the records.
    axes = (-4, -4, -4, -4 if is_kda else -3, -4)
    with on_device(state):
        fold_kernel[(layers * rows * hv * tile.tiles,)](
            state, d, k, g, src, pos, dst_state, dst, rows,
            *(x.stride(0) if state.ndim == 5 else 0 for x in pools),
            *(x.stride(axis) for x, axis in zip(pools, axes, strict=True)),
            src.stride(0), pos.stride(0), dst.stride(0),
            H=k.shape[-3], HV=hv, K=k_dim, V=v_dim, L=d.shape[-2],
            BV=tile.BV, BK=tile.BK, BC=tile.BC, VEC=tile.VEC, TILES=tile.tiles, EVEN=tile.even,
            L2NORM=use_l2norm, IS_KDA=is_kda, IN_PLACE=in_place, UNROLL=UNROLL, num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
