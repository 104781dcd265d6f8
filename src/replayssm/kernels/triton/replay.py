"""Replay decode: one program is BV state rows of one value head of one batch row.

It reads its tile of the checkpoint once and the valid records of the ring, and either appends the record (d, k, g)
or folds. No V×K product is formed unless it folds. Programs of one head do not wait for each other: a launch writes
either the record at the cursor, which no program reads, or state rows that only their own program reads.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import OPTIONS, UNROLL, decode_tile, on_device
from replayssm.kernels.triton.tiles import (
    columns,
    decayed,
    fold_records,
    load_beta,
    load_gate,
    load_q_k,
    load_state,
    read_records,
    read_state,
    store_state,
)


@triton.jit
def replay_kernel(
    qkv_ptr, a_ptr, b_ptr, A_log_ptr, bias_ptr, state_ptr, d_ptr, k_ptr, g_ptr, out_ptr, slot_ptr, pos_ptr, force_ptr,
    scale, lower_bound, beta_scale,
    qkv_row, a_row, a_head, a_chan, b_row, b_head, A_log_head, bias_head, bias_chan,
    state_slot, d_slot, k_slot, g_slot, out_row, slot_step, pos_step, force_step,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr, BJ: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, L2NORM: tl.constexpr, IS_KDA: tl.constexpr, BOUNDED: tl.constexpr, HAS_FORCE: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the batch x HV x TILES, on one axis, since the others end at 65535."""
    pid = tl.program_id(0)
    tile = pid % TILES
    head = pid // TILES % HV
    row = (pid // (TILES * HV)).to(tl.int64)
    first = tile * BV
    rows = first + tl.arange(0, BV)
    out_at = out_ptr + row * out_row + head * V + rows
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)  # 64 bits from here on: pools pass 2**31 elements
    if slot < 0:
        tl.store(out_at, tl.zeros([BV], out_ptr.dtype.element_ty), mask=rows < V)
        return

    cols = columns(BK, BC)
    state_at = state_ptr + slot * state_slot + head * (V * K)
    s = load_state(state_at, first, K, V, BV, BK, BC, VEC, EVEN)  # first, so that the rest runs while it is under way
    n = tl.load(pos_ptr + row * pos_step)
    fold = n == L - 1
    if HAS_FORCE:
        fold = fold | (tl.load(force_ptr + row * force_step) != 0)
    key_head = head // (HV // H)
    d_at = d_ptr + slot * d_slot + head * (L * V)
    k_at = k_ptr + slot * k_slot + key_head * (L * K)
    g_at = g_ptr + slot * g_slot + head * (L * K if IS_KDA else L)

    token = qkv_ptr + row * qkv_row
    q, k, k_raw = load_q_k(token, key_head, cols, scale, H, K, L2NORM, EVEN)
    v = tl.load(token + 2 * H * K + head * V + rows, mask=rows < V, other=0.0).to(tl.float32)
    wide = head.to(tl.int64)  # a and b may have any stride
    g = load_gate(
        a_ptr + row * a_row + wide * a_head, a_chan, A_log_ptr + head * A_log_head, bias_ptr + head * bias_head,
        bias_chan, cols, lower_bound, K, IS_KDA, BOUNDED,
    )  # fmt: skip
    beta = load_beta(b_ptr + row * b_row + wide * b_head, beta_scale)
    qk = tl.sum(tl.sum(q * k, 0), 0)

    if L > 1:
        ring_q, ring_k, total = read_records(
            q, k, g, d_at, k_at, g_at, n, rows, cols, K, V, BV, BJ, BK, BC, VEC, L2NORM, IS_KDA
        )  # fmt: skip
        state_q, state_k = read_state(s, q, k, total, IS_KDA)
        d = beta * (v - (state_k + ring_k))
        o = state_q + ring_q + d * qk
    else:
        state_q, state_k = read_state(s, q, k, g, IS_KDA)
        d = beta * (v - state_k)
        o = state_q + d * qk
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=rows < V)

    if fold:
        acc = d[None, :, None] * k[:, None, :]
        if L > 1:
            acc, g = fold_records(acc, g, d_at, k_at, g_at, n, rows, cols, K, V, L2NORM, IS_KDA, UNROLL)
        # Loaded again (it is in the cache) rather than kept in registers through the step.
        s = load_state(state_at, first, K, V, BV, BK, BC, VEC, EVEN)
        store_state(state_at, decayed(s, g, IS_KDA) + acc, first, K, V, BV, BK, BC, VEC, EVEN)
    else:
        tl.store(d_at + n * V + rows, d, mask=rows < V)
        if tile == 0:
            if IS_KDA:
                tl.store(g_at + n * K + cols, g, mask=cols < K)
            else:
                tl.store(g_at + n, g)
            if head % (HV // H) == 0:  # one writer for the value heads of a key head
                tl.store(k_at + n * K + cols, k_raw.to(k_ptr.dtype.element_ty), mask=cols < K)


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
    rows, (_, hv, v_dim, k_dim), ring_len = mixed_qkv.shape[0], initial_state.shape, d_cache.shape[2]
    if not rows:
        return
    tile = decode_tile(
        "kda" if is_kda else "gdn", initial_state.element_size(), rows * hv, v_dim, k_dim, ring_len
    )  # fmt: skip
    force = write_pos if force_flush is None else force_flush
    with on_device(initial_state):
        replay_kernel[(rows * hv * tile.tiles,)](
            mixed_qkv, a, b, A_log, dt_bias, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
            write_pos, force, scale, lower_bound or 0.0, beta_scale,
            mixed_qkv.stride(0), a.stride(0), a.stride(1), a.stride(-1), b.stride(0), b.stride(1),
            A_log.stride(0), dt_bias.stride(0), dt_bias.stride(-1),
            initial_state.stride(0), d_cache.stride(0), k_cache.stride(0), g_cache.stride(0), out.stride(0),
            ssm_state_indices.stride(0), write_pos.stride(0), force.stride(0),
            H=k_cache.shape[1], HV=hv, K=k_dim, V=v_dim, L=ring_len,
            BV=tile.BV, BK=tile.BK, BC=tile.BC, VEC=tile.VEC, BJ=tile.BJ, TILES=tile.tiles, EVEN=tile.even,
            L2NORM=use_qk_l2norm_in_kernel, IS_KDA=is_kda, BOUNDED=lower_bound is not None,
            HAS_FORCE=force_flush is not None, UNROLL=UNROLL, num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
