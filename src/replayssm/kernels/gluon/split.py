# mypy: ignore-errors
# ruff: noqa: RUF005, SIM114 - no unpacking in kernels, and a constant `if` stands alone
"""Replay decode in two launches: `prologue` once per value head, then `readout` of the checkpoint.

The prologue does what does not depend on V (norms, gates, ring dot products) and puts it in a scratch buffer, so
the readout is the same for all gates and light. It also appends k and g; the readout appends d. A flushing row folds
in the readout (FOLD 1), which weights the records again, or in a third launch, `fold.fold_rows` (FOLD 0).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import (
    as_rows,
    copy_to_shared,
    ring_d_layout,
    ring_k_layout,
    row_major,
    state_layout,
)


@gluon.jit
def prologue(
    qkv, a, b, A_log, dt_bias, scale, k_ring, g_ring, slots, write_pos, scratch, lower_bound, beta_scale,
    qkv_row, a_row, a_head, a_chan, b_row, b_head, k_slot, g_slot,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, L: gl.constexpr, LP: gl.constexpr, KDA: gl.constexpr,
    BOUNDED: gl.constexpr, L2NORM: gl.constexpr, NW: gl.constexpr, SCAN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """scratch [B·HV, 2·K + 2·LP + 8]: decayed q̂, decayed k̂, ring coefficients of both, beta, k̂·q̂."""
    kl: gl.constexpr = ring_k_layout(LP, K, NW)
    kcol: gl.constexpr = gl.SliceLayout(0, kl)
    R: gl.constexpr = HV // H
    if PDL:
        gdc_launch_dependents()
    pid = gl.program_id(0)
    hv = pid % HV
    n = (pid // HV).to(gl.int64)
    h = hv // R
    slot = gl.load(slots + n).to(gl.int64)
    if slot < 0:
        return
    wp = gl.load(write_pos + n)
    okk = gl.arange(0, K, kcol)
    rec = gl.arange(0, LP, gl.SliceLayout(1, kl))
    k_base = k_ring + slot * k_slot + h * (L * K)
    g_base = g_ring + slot * g_slot + hv * (L * K if KDA else L)
    k_raw = blocks.load_ring_k(k_base, wp, K, LP, kl).to(gl.float32)
    if KDA:
        g_next = blocks.load_next_g(g_base, wp, K, LP, kl)
    row_ptr = qkv + n * qkv_row
    k_own = gl.load(row_ptr + (H + h) * K + okk)
    q, k = gl.load(row_ptr + h * K + okk).to(gl.float32), k_own.to(gl.float32)
    rate = gl.exp(gl.load(A_log + hv).to(gl.float32))
    beta = beta_scale * blocks.sigmoid(gl.load(b + n * b_row + hv * b_head).to(gl.float32))
    q = q * (blocks.inverse_norm(q, L2NORM) * scale)
    k = k * blocks.inverse_norm(k, L2NORM)
    if KDA:
        x = gl.load(a + n * a_row + hv * a_head + okk * a_chan).to(gl.float32)
        x += gl.load(dt_bias + hv * K + okk).to(gl.float32)
        g = blocks.log_decay(x, rate, lower_bound, BOUNDED)
        w, decay = blocks.channel_decays(g_base, g_next, wp, g, K, LP, kl, SCAN)
        _, cq, ck = blocks.ring_dots(k_raw, k_raw * w, q, k, L2NORM)
        gl.store(g_base + wp * K + okk, g)
    else:
        x = gl.load(a + n * a_row + hv * a_head).to(gl.float32) + gl.load(dt_bias + hv).to(gl.float32)
        g = blocks.log_decay(x, rate, lower_bound, BOUNDED)
        w, decay = blocks.head_decays(g_base, wp, g, LP, kl)
        _, cq, ck = blocks.ring_dots(k_raw, k_raw, q, k, L2NORM)
        cq, ck = cq * w, ck * w
        gl.store(g_base + wp, g)
    if hv % R == 0:
        gl.store(k_base + wp * K + okk, k_own)
    to = scratch + (n * HV + hv) * (2 * K + 2 * LP + 8)
    gl.store(to + okk, q * decay)
    gl.store(to + K + okk, k * decay)
    gl.store(to + 2 * K + rec, cq)
    gl.store(to + 2 * K + LP + rec, ck)
    gl.store(to + 2 * K + 2 * LP, beta)
    gl.store(to + 2 * K + 2 * LP + 1, gl.sum(q * k, 0))


@gluon.jit
def readout(
    qkv, state, d_ring, k_ring, g_ring, out, slots, write_pos, force, scratch, qkv_row, out_row, state_slot, d_slot,
    k_slot, g_slot,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, LP: gl.constexpr,
    KDA: gl.constexpr, L2NORM: gl.constexpr, FORCE: gl.constexpr, BV: gl.constexpr, CH: gl.constexpr,
    NW: gl.constexpr, STAGED: gl.constexpr, FOLD: gl.constexpr, SCAN: gl.constexpr, EVICT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Output and d of BV rows of V of one value head, from the checkpoint, the d ring and `scratch`."""
    ELEM: gl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    blk: gl.constexpr = state_layout(CH, K, ELEM, NW)
    dlay: gl.constexpr = ring_d_layout(CH, K, ELEM, NW)
    vrow: gl.constexpr = gl.SliceLayout(1, blk)
    tcol: gl.constexpr = gl.SliceLayout(0, blk)
    TILES: gl.constexpr = V // BV
    CHUNKS: gl.constexpr = BV // CH

    pid = gl.program_id(0)
    row0 = pid % TILES * BV
    hv = pid // TILES % HV
    n = (pid // (TILES * HV)).to(gl.int64)
    slot = gl.load(slots + n).to(gl.int64)
    ov = row0 + gl.arange(0, CH, vrow)
    out_ptr = out + n * out_row + hv * V + ov
    if slot < 0:
        for c in gl.static_range(CHUNKS):
            gl.store(out_ptr + c * CH, gl.full([CH], 0.0, out.dtype.element_ty, vrow))
        return
    ok = gl.arange(0, K, tcol)
    s_ptr = state + slot * state_slot + hv * (V * K) + ov[:, None] * K + ok[None, :]
    if STAGED:
        staged = ()  # one buffer a chunk: the compiler puts a barrier between two copies into one buffer
        for c in gl.static_range(CHUNKS):
            staged = staged + (gl.allocate_shared_memory(state.dtype.element_ty, [CH, K], row_major()),)
            copy_to_shared(staged[c], s_ptr + c * (CH * K), eviction_policy=EVICT)
            async_copy.commit_group()
    else:
        s_next = gl.load(s_ptr, eviction_policy=EVICT)
    wp = gl.load(write_pos + n)
    rec = gl.arange(0, LP, gl.SliceLayout(0, dlay))
    orow = row0 + gl.arange(0, CH, gl.SliceLayout(1, dlay))
    d_base = d_ring + slot * d_slot + hv * (L * V)
    v_ptr = qkv + n * qkv_row + 2 * H * K + hv * V + ov
    d_tile = d_base + rec[None, :] * V + orow[:, None]
    dr, v = (), ()
    for c in gl.static_range(CHUNKS):
        dr = dr + (gl.load(d_tile + c * CH, mask=(rec < wp)[None, :], other=0.0),)
        v = v + (gl.load(v_ptr + c * CH),)
    if PDL:
        gdc_wait()  # the checkpoint and d were not written by the prologue, its results were
    at_head = scratch + (n * HV + hv) * (2 * K + 2 * LP + 8)
    qe = gl.load(at_head + ok)
    ke = gl.load(at_head + K + ok)
    cq = gl.load(at_head + 2 * K + rec)
    ck = gl.load(at_head + 2 * K + LP + rec)
    beta = gl.load(at_head + 2 * K + 2 * LP)
    kq = gl.load(at_head + 2 * K + 2 * LP + 1)
    if FOLD > 0:
        kl: gl.constexpr = ring_k_layout(LP, K, NW)
        flush = wp == L - 1
        if FORCE:
            flush = flush | (gl.load(force + n) != 0)
        tile = gl.allocate_shared_memory(gl.float32, [LP, K], row_major())
        decays = gl.allocate_shared_memory(gl.float32, [1, K], row_major())
        if flush:
            k_base = k_ring + slot * k_slot + hv // (HV // H) * (L * K)
            g_base = g_ring + slot * g_slot + hv * (L * K if KDA else L)
            weighted, decay = blocks.weighted_records(k_base, g_base, wp + 1, K, LP, KDA, L2NORM, SCAN, kl)
            tile.store(weighted)
            decays.store(gl.expand_dims(decay, 0))
    for c in gl.static_range(CHUNKS):
        at = c * CH
        if STAGED:
            async_copy.wait_group(CHUNKS - 1 - c)
            s = staged[c].load(blk).to(gl.float32)
        else:
            s = s_next.to(gl.float32)
            if c + 1 < CHUNKS:
                s_next = gl.load(s_ptr + (at + CH) * K, eviction_policy=EVICT)
        sq = gl.sum(s * qe[None, :], 1) + gl.convert_layout(gl.sum(dr[c] * cq[None, :], 1), vrow)
        sk = gl.sum(s * ke[None, :], 1) + gl.convert_layout(gl.sum(dr[c] * ck[None, :], 1), vrow)
        d = beta * (v[c].to(gl.float32) - sk)
        gl.store(out_ptr + at, (sq + d * kq).to(out.dtype.element_ty))
        d_ptr = d_base + at + ov
        if FOLD == 0:
            gl.store(d_ptr + wp * V, d)
        elif flush == 0:
            gl.store(d_ptr + wp * V, d)
        else:
            rows = as_rows(tile, LP, K)
            s = blocks.fold_fma(s * decays.load(blk), rows, d_ptr, d, wp, V, blk)
            gl.store(s_ptr + at * K, blocks.to_state(s, state.dtype.element_ty))
