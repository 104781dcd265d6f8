# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102 - no unpacking in kernels, and a constant `if` stands alone
"""Replay decode in one launch: a program serves BV rows of V of one value head of one row of the batch.

The loads of the checkpoint tile are issued first; norms, gates and the ring's dot products run while they fly.
The tile lands in registers, CH rows at a time. A flushing row folds the rows that it holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import (
    as_rows,
    ring_d_layout,
    ring_k_layout,
    row_major,
    state_layout,
)


@gluon.jit
def replay_fused(
    qkv, a, b, A_log, dt_bias, scale, state, d_ring, k_ring, g_ring, out, slots, write_pos, force, lower_bound,
    beta_scale, qkv_row, a_row, a_head, a_chan, b_row, b_head, out_row, state_slot, d_slot, k_slot, g_slot,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, L: gl.constexpr,
    LP: gl.constexpr, KDA: gl.constexpr, BOUNDED: gl.constexpr, L2NORM: gl.constexpr, FORCE: gl.constexpr,
    BV: gl.constexpr, CH: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """See `backend.replay_decode`. `KP` and `LP`: K and L rounded up to a power of two, L to 8 at least."""
    ELEM: gl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    blk: gl.constexpr = state_layout(CH, KP, ELEM, NW)
    dlay: gl.constexpr = ring_d_layout(CH, KP, ELEM, NW)
    kl: gl.constexpr = ring_k_layout(LP, KP, NW)
    vrow: gl.constexpr = gl.SliceLayout(1, blk)
    tcol: gl.constexpr = gl.SliceLayout(0, blk)
    kcol: gl.constexpr = gl.SliceLayout(0, kl)
    drec: gl.constexpr = gl.SliceLayout(0, dlay)
    TILES: gl.constexpr = V // BV
    CHUNKS: gl.constexpr = BV // CH
    R: gl.constexpr = HV // H
    VEC: gl.constexpr = 16 // ELEM
    LANES: gl.constexpr = min(8, KP // VEC)

    gdc_wait()  # before anything of earlier kernels is read or written
    pid = gl.program_id(0)
    row0 = pid % TILES * BV
    hv = pid // TILES % HV
    n = (pid // (TILES * HV)).to(gl.int64)
    h = hv // R
    slot = gl.load(slots + n).to(gl.int64)
    ov = row0 + gl.arange(0, CH, vrow)
    out_ptr = out + n * out_row + hv * V + ov
    if slot < 0:
        for c in gl.static_range(CHUNKS):
            gl.store(out_ptr + c * CH, gl.full([CH], 0.0, out.dtype.element_ty, vrow))
        return

    ok = gl.arange(0, KP, tcol)
    s_ptr = state + (slot * state_slot + hv * (V * K)) + (ov[:, None] * K + ok[None, :])
    s_next = blocks.load_columns(s_ptr, ok[None, :], K, KP)
    wp = gl.load(write_pos + n)
    flush = wp == L - 1
    if FORCE:
        flush = flush | (gl.load(force + n) != 0)

    okk = gl.arange(0, KP, kcol)
    k_base = k_ring + slot * k_slot + h * (L * K)
    d_base = d_ring + slot * d_slot + hv * (L * V)
    g_base = g_ring + slot * g_slot + hv * (L * K if KDA else L)
    k_raw = blocks.load_ring_k(k_base, wp, K, KP, LP, kl)
    if KDA:
        g_next = blocks.load_next_g(g_base, wp, K, KP, LP, kl)
    row_ptr = qkv + n * qkv_row
    v_ptr = row_ptr + 2 * H * K + hv * V + ov
    rec = blocks.newest_first(LP, drec)
    orow = row0 + gl.arange(0, CH, gl.SliceLayout(1, dlay))
    d_tile = d_base + rec[None, :] * V + orow[:, None]
    dr, v = (), ()
    for c in gl.static_range(CHUNKS):
        dr = dr + (gl.load(d_tile + c * CH, mask=(rec < wp)[None, :], other=0.0),)
        v = v + (gl.load(v_ptr + c * CH),)
    q_ptr = row_ptr + h * K
    k_ptr = row_ptr + (H + h) * K
    k_own = blocks.load_columns(k_ptr + okk, okk, K, KP)
    qk, kk = blocks.load_columns(q_ptr + okk, okk, K, KP).to(gl.float32), k_own.to(gl.float32)
    qt = blocks.load_columns(q_ptr + ok, ok, K, KP).to(gl.float32)
    kt = blocks.load_columns(k_ptr + ok, ok, K, KP).to(gl.float32)

    rate = blocks.decay_rate(gl.load(A_log + hv))
    beta = beta_scale * blocks.sigmoid(gl.load(b + n * b_row + hv * b_head).to(gl.float32))
    # q and k of the tile stay as they are: their norms, and a decay that is one number, are applied to the sums.
    q_by, k_by, kq = blocks.norms(qt, kt, scale, L2NORM)
    qk, kk = qk * q_by, kk * k_by

    k_raw = k_raw.to(gl.float32)
    if KDA:
        x = blocks.load_columns(a + n * a_row + hv * a_head + okk * a_chan, okk, K, KP).to(gl.float32)
        x += blocks.load_columns(dt_bias + hv * K + okk, okk, K, KP).to(gl.float32)
        g = blocks.log_decay(x, rate, lower_bound, BOUNDED)
        w, total = blocks.channel_decays(g_base, g_next, wp, g, K, KP, kl)
        weighted = k_raw * w
        inv, cq, ck = blocks.ring_dots(k_raw, weighted, qk, kk, L2NORM)
        decay = gl.convert_layout(total, tcol)
        qt, kt = qt * decay, kt * decay
        g_ptr = g_base + wp * K + okk
    else:
        x = gl.load(a + n * a_row + hv * a_head).to(gl.float32) + gl.load(dt_bias + hv).to(gl.float32)
        g = blocks.log_decay(x, rate, lower_bound, BOUNDED)
        w, decay = blocks.head_decays(g_base, blocks.newest_first(LP, gl.SliceLayout(1, kl)), wp, g, LP)
        weighted = k_raw
        inv, cq, ck = blocks.ring_dots(k_raw, weighted, qk, kk, L2NORM)
        cq, ck, inv = cq * w, ck * w, inv * w
        q_by, k_by = q_by * decay, k_by * decay
        g_ptr = g_base + wp
    tile = gl.allocate_shared_memory(gl.float32, [LP, KP], row_major())
    if flush:
        blocks.stash_records(tile, weighted, inv, kk, wp, LP, kl)
    cq = gl.convert_layout(cq, drec)
    ck = gl.convert_layout(ck, drec)
    if flush == 0:
        if row0 == 0:
            if KDA:
                blocks.store_columns(g_ptr, g, okk, K, KP)
            else:
                gl.store(g_ptr, g)
            if hv % R == 0:
                blocks.store_columns(k_base + wp * K + okk, k_own, okk, K, KP)

    for c in gl.static_range(CHUNKS):
        at = c * CH
        s = s_next.to(gl.float32)
        if c + 1 < CHUNKS:
            s_next = blocks.load_columns(s_ptr + (at + CH) * K, ok[None, :], K, KP)
        sq = q_by * gl.convert_layout(blocks.lane_sums(s * qt[None, :], LANES, VEC), dlay, assert_trivial=True)
        sk = k_by * gl.convert_layout(blocks.lane_sums(s * kt[None, :], LANES, VEC), dlay, assert_trivial=True)
        sq += gl.convert_layout(blocks.lane_sums(dr[c] * cq[None, :], LANES, 1), dlay, assert_trivial=True)
        sk += gl.convert_layout(blocks.lane_sums(dr[c] * ck[None, :], LANES, 1), dlay, assert_trivial=True)
        sq = gl.convert_layout(gl.sum(sq, 1), vrow, assert_trivial=True)
        sk = gl.convert_layout(gl.sum(sk, 1), vrow, assert_trivial=True)
        d = beta * (v[c].to(gl.float32) - sk)
        gl.store(out_ptr + at, (sq + d * kq).to(out.dtype.element_ty))
        d_ptr = d_base + at + ov
        if flush == 0:
            gl.store(d_ptr + wp * V, d)
        else:
            s = s * (decay[None, :] if KDA else decay)
            rows = as_rows(tile, LP, KP)
            s = blocks.fold_fma(s, rows, d_ptr, d, wp, V, LP, blk)
            blocks.store_columns(s_ptr + at * K, blocks.to_state(s, state.dtype.element_ty), ok[None, :], K, KP)
