"""Windows of several tokens a row: the recurrence on state tiles that stay in registers from token to token.

One kernel for all of them. With a ring, a program first forms its tile of the true state, checkpoint and records, and
writes it back where the row flushes; without one, the tile is loaded. Each token then costs no state traffic at all.
Keys and gates go into the ring in a second small launch: programs of other tiles still read the old ones in this one.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102 - a constant `if` stands alone
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import OPTIONS, UNROLL, WINDOW_UNROLL, decode_tile, on_device, power_of_2
from replayssm.kernels.triton.numerics import row_sums
from replayssm.kernels.triton.tiles import (
    columns,
    decayed,
    fold_records,
    load_beta,
    load_gate,
    load_q_k,
    load_state,
    store_state,
)


@triton.jit
def first_record(pos, count, force_ptr, L: tl.constexpr, HAS_FORCE: tl.constexpr):
    """Whether the row folds its ring, and where the records of its window begin."""
    flush = pos + count >= L
    if HAS_FORCE:
        flush = flush | (tl.load(force_ptr) != 0)
    return flush, tl.where(flush, 0, pos)


@triton.jit
def window_kernel(
    qkv_ptr, a_ptr, b_ptr, A_log_ptr, bias_ptr, state_ptr, d_ptr, k_ptr, g_ptr, snap_ptr, out_ptr, slot_ptr, pos_ptr,
    count_ptr, force_ptr, scale, lower_bound, beta_scale, num_rows,
    qkv_layer, qkv_row, qkv_token, a_layer, a_row, a_token, a_head, a_chan, b_layer, b_row, b_token, b_head,
    A_log_layer, A_log_head, bias_layer, bias_head, bias_chan, state_layer, state_slot, d_slot, k_slot, g_slot,
    snap_row, snap_token, out_row, out_token, slot_step, pos_step, count_step, force_step,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    L2NORM: tl.constexpr, IS_KDA: tl.constexpr, BOUNDED: tl.constexpr, HAS_FORCE: tl.constexpr, RING: tl.constexpr,
    SNAP: tl.constexpr, COMMIT: tl.constexpr, UNROLL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: layers x rows x HV x TILES, on one axis. RING: records of the row, and d of each token goes there.

    SNAP: the state after each token is kept. COMMIT: no outputs; the state after the last token is stored.
    """
    pid = tl.program_id(0)
    first = pid % TILES * BV
    rows = first + tl.arange(0, BV)
    head = pid // TILES % HV
    entry = pid // (TILES * HV)
    row = (entry % num_rows).to(tl.int64)
    layer = (entry // num_rows).to(tl.int64)
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    count = tl.load(count_ptr + row * count_step)
    count = tl.where(slot < 0, 0, count)
    out_at = out_ptr + row * out_row + head * V + rows
    if not COMMIT:
        for dead in range(count, T):
            tl.store(
                out_at + tl.cast(dead, tl.int64) * out_token, tl.zeros([BV], out_ptr.dtype.element_ty), mask=rows < V
            )
    if slot < 0:
        return
    if COMMIT and count <= 0:
        return

    cols = columns(BK, BC)
    state_at = state_ptr + layer * state_layer + slot * state_slot + head * (V * K)
    s = load_state(state_at, first, K, V, BV, BK, BC, VEC, EVEN).to(tl.float32)
    key_head = head // (HV // H)
    if RING:
        d_at = d_ptr + slot * d_slot + head * (L * V)
        n = tl.load(pos_ptr + row * pos_step)
        flush, begin = first_record(n, count, force_ptr + row * force_step, L, HAS_FORCE)
        if n > 0:
            acc = tl.zeros([BK // BC, BV, BC], tl.float32)
            if IS_KDA:
                total = tl.zeros([BK // BC, BC], tl.float32)
            else:
                total = tl.zeros([], tl.float32)
            acc, total = fold_records(
                acc, total, d_at, k_ptr + slot * k_slot + key_head * (L * K),
                g_ptr + slot * g_slot + head * (L * K if IS_KDA else L), n, rows, cols, K, V, L2NORM, IS_KDA, UNROLL,
            )  # fmt: skip
            s = decayed(s, total, IS_KDA) + acc
            if flush:
                store_state(state_at, s, first, K, V, BV, BK, BC, VEC, EVEN)
            tl.debug_barrier()  # d of the window may be written over d of the ring, by another thread than read it

    wide = head.to(tl.int64)  # gates may have any stride
    token_at = qkv_ptr + layer * qkv_layer + row * qkv_row
    a_at = a_ptr + layer * a_layer + row * a_row + wide * a_head
    b_at = b_ptr + layer * b_layer + row * b_row + wide * b_head
    for base in range(0, count, TOKENS):
        for u in tl.static_range(TOKENS):  # no branch between them, so that their loads overlap
            live = base + u < count
            t = tl.cast(tl.minimum(base + u, count - 1), tl.int64)  # past the end the last token again, without effect
            mine = rows < tl.where(live, V, 0)
            token = token_at + t * qkv_token
            q, k, _ = load_q_k(token, key_head, cols, scale, H, K, L2NORM, EVEN)
            v = tl.load(token + 2 * H * K + head * V + rows, mask=rows < V, other=0.0).to(tl.float32)
            g = load_gate(
                a_at + t * a_token, a_chan, A_log_ptr + layer * A_log_layer + head * A_log_head,
                bias_ptr + layer * bias_layer + head * bias_head, bias_chan, cols, lower_bound, K, IS_KDA, BOUNDED,
            )  # fmt: skip
            s = decayed(s, tl.where(live, g, 0.0), IS_KDA)
            d = load_beta(b_at + t * b_token, beta_scale) * (v - row_sums(s * k[:, None, :]))
            s += tl.where(live, d, 0.0)[None, :, None] * k[:, None, :]
            if not COMMIT:
                o = row_sums(s * q[:, None, :])
                tl.store(out_at + t * out_token, o.to(out_ptr.dtype.element_ty), mask=mine)
            if RING:
                tl.store(d_at + (begin + base + u) * V + rows, d, mask=mine)
            if SNAP:
                if live:
                    snap_at = snap_ptr + row * snap_row + t * snap_token + head * (V * K)
                    store_state(snap_at, s, first, K, V, BV, BK, BC, VEC, EVEN)
    if COMMIT:
        store_state(state_at, s, first, K, V, BV, BK, BC, VEC, EVEN)


@triton.jit
def append_kernel(
    qkv_ptr, a_ptr, A_log_ptr, bias_ptr, k_ptr, g_ptr, slot_ptr, pos_ptr, count_ptr, force_ptr, lower_bound,
    qkv_row, qkv_token, a_row, a_token, a_head, a_chan, A_log_head, bias_head, bias_chan, k_slot, g_slot,
    slot_step, pos_step, count_step, force_step,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    IS_KDA: tl.constexpr, BOUNDED: tl.constexpr, HAS_FORCE: tl.constexpr,
):  # fmt: skip
    """Grid: rows x HV. Raw k and g of a window's tokens into the ring, k by the first value head of a key head."""
    pid = tl.program_id(0)
    head = pid % HV
    row = (pid // HV).to(tl.int64)
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    if slot < 0:
        return
    count = tl.load(count_ptr + row * count_step)
    n = tl.load(pos_ptr + row * pos_step)
    _, begin = first_record(n, count, force_ptr + row * force_step, L, HAS_FORCE)
    cols = tl.arange(0, BK)
    wide = head.to(tl.int64)
    for i in range(count):
        t = tl.cast(i, tl.int64)
        at = begin + i
        g = load_gate(
            a_ptr + row * a_row + t * a_token + wide * a_head, a_chan, A_log_ptr + head * A_log_head,
            bias_ptr + head * bias_head, bias_chan, cols, lower_bound, K, IS_KDA, BOUNDED,
        )  # fmt: skip
        if IS_KDA:
            tl.store(g_ptr + slot * g_slot + head * (L * K) + at * K + cols, g, mask=cols < K)
        else:
            tl.store(g_ptr + slot * g_slot + head * L + at, g)
        if head % (HV // H) == 0:
            key_head = head // (HV // H)
            k_at = qkv_ptr + row * qkv_row + t * qkv_token + (H + key_head) * K
            k = tl.load(k_at + cols, mask=cols < K, other=0.0)
            tl.store(k_ptr + slot * k_slot + key_head * (L * K) + at * K + cols, k, mask=cols < K)


def replay_verify(
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
    lengths: Tensor,
    force_flush: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """See `replayssm.ops.fused_recurrent_linear_replayssm_verify`."""
    rows, (_, hv, _, k_dim) = mixed_qkv.shape[0], initial_state.shape
    if not rows:
        return
    ring = d_cache, k_cache, g_cache
    _launch(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, ring, None, out, ssm_state_indices, write_pos, lengths,
        force_flush, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip
    force = write_pos if force_flush is None else force_flush
    with on_device(initial_state):
        append_kernel[(rows * hv,)](
            mixed_qkv, a, A_log, dt_bias, k_cache, g_cache, ssm_state_indices, write_pos, lengths, force,
            lower_bound or 0.0, *mixed_qkv.stride()[:2], *a.stride()[:3], a.stride(-1), A_log.stride(0),
            dt_bias.stride(0), dt_bias.stride(-1), k_cache.stride(0), g_cache.stride(0), ssm_state_indices.stride(0),
            write_pos.stride(0), lengths.stride(0), force.stride(0),
            H=k_cache.shape[1], HV=hv, K=k_dim, L=d_cache.shape[2], BK=power_of_2(k_dim), IS_KDA=is_kda,
            BOUNDED=lower_bound is not None, HAS_FORCE=force_flush is not None, num_warps=1, **OPTIONS,
        )  # fmt: skip


def packed_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    snapshots: Tensor | None,
    out: Tensor,
    ssm_state_indices: Tensor,
    lengths: Tensor,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """See `replayssm.ops.fused_recurrent_linear_packed_verify`."""
    _launch(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, None, snapshots, out, ssm_state_indices, None, lengths,
        None, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def commit_kv_replay(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    accepted: Tensor,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """See `replayssm.ops.commit_kv_replay`: all layers in one launch."""
    _launch(
        mixed_qkv, a, b, A_log, dt_bias, 1.0, initial_state, None, None, None, ssm_state_indices, None, accepted, None,
        use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def _launch(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, state: Tensor,
    ring: tuple[Tensor, Tensor, Tensor] | None, snapshots: Tensor | None, out: Tensor | None, slots: Tensor,
    pos: Tensor | None, counts: Tensor, force: Tensor | None, use_l2norm: bool, is_kda: bool,
    lower_bound: float | None, beta_scale: float,
) -> None:  # fmt: skip
    """`out` None: a commit. What is None is a pointer and strides that the kernel does not look at."""
    rows, tokens = mixed_qkv.shape[-3:-1]
    hv, v_dim, k_dim = state.shape[-3:]
    layers = state.shape[0] if state.ndim == 5 else 1
    if not rows or not layers:
        return
    ring_len = 1 if ring is None else ring[0].shape[2]
    tile = decode_tile("kda" if is_kda else "gdn", state.element_size(), layers * rows * hv, v_dim, k_dim, ring_len)
    d, k, g = ring or (state, state, state)
    snap, output = (state if x is None else x for x in (snapshots, out))
    at, flags = (counts if x is None else x for x in (pos, force))
    lead = [0 if state.ndim == 4 else x.stride(0) for x in (mixed_qkv, a, b, A_log, dt_bias, state)]
    gate = (*a.stride()[-4:],) if is_kda else (*a.stride()[-3:], 0)
    with on_device(state):
        window_kernel[(layers * rows * hv * tile.tiles,)](
            mixed_qkv, a, b, A_log, dt_bias, state, d, k, g, snap, output, slots, at, counts, flags, scale,
            lower_bound or 0.0, beta_scale, rows,
            lead[0], *mixed_qkv.stride()[-3:-1], lead[1], *gate, lead[2], *b.stride()[-3:], lead[3], A_log.stride(-1),
            lead[4], dt_bias.stride(-2 if is_kda else -1), dt_bias.stride(-1), lead[5], state.stride(-4), d.stride(0),
            k.stride(0), g.stride(0), *snap.stride()[:2], *output.stride()[:2], slots.stride(0), at.stride(0),
            counts.stride(0), flags.stride(0),
            H=(mixed_qkv.shape[-1] - hv * v_dim) // (2 * k_dim), HV=hv, K=k_dim, V=v_dim, L=ring_len, T=tokens,
            BV=tile.BV, BK=tile.BK, BC=tile.BC, VEC=tile.VEC, TILES=tile.tiles, EVEN=tile.even, L2NORM=use_l2norm,
            IS_KDA=is_kda, BOUNDED=lower_bound is not None, HAS_FORCE=force is not None, RING=ring is not None,
            SNAP=snapshots is not None, COMMIT=out is None, UNROLL=UNROLL, TOKENS=min(WINDOW_UNROLL, tokens),
            num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
