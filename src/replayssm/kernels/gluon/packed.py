# mypy: ignore-errors
# ruff: noqa: RUF005 - no unpacking in kernels, and a constant `if` stands alone
"""Packed decode: every row reads its whole state, updates it and writes it back. Structure as in `fused`.

Mostly best with small tiles whose rows a warp reads and writes whole: one piece a row costs less than four.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import copy_to_shared, ring_k_layout, row_major, state_layout


@gluon.jit
def packed(
    qkv, a, b, A_log, dt_bias, scale, state, out, slots, lower_bound, beta_scale,
    qkv_row, a_row, a_head, a_chan, b_row, b_head, out_row, state_slot,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, KDA: gl.constexpr,
    BOUNDED: gl.constexpr, L2NORM: gl.constexpr, BV: gl.constexpr, CH: gl.constexpr, NW: gl.constexpr,
    WHOLE: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """See `backend.packed_decode`."""
    ELEM: gl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    blk: gl.constexpr = state_layout(CH, KP, ELEM, NW, 32 if WHOLE else 8)
    vrow: gl.constexpr = gl.SliceLayout(1, blk)
    tcol: gl.constexpr = gl.SliceLayout(0, blk)
    # Gates are costly: the tile's layout gives all warps and lane groups the same, this one gives each thread others.
    # Whole rows mean one warp or two, each with all channels once.
    gcol: gl.constexpr = tcol if WHOLE else gl.SliceLayout(0, ring_k_layout(8, KP, NW))
    TILES: gl.constexpr = V // BV
    CHUNKS: gl.constexpr = BV // CH

    gdc_wait()  # before anything of earlier kernels is read or written
    pid = gl.program_id(0)
    row0 = pid % TILES * BV
    hv = pid // TILES % HV
    n = (pid // (TILES * HV)).to(gl.int64)
    h = hv // (HV // H)
    slot = gl.load(slots + n).to(gl.int64)
    ov = row0 + gl.arange(0, CH, vrow)
    out_ptr = out + n * out_row + hv * V + ov
    if slot < 0:
        for c in gl.static_range(CHUNKS):
            gl.store(out_ptr + c * CH, gl.full([CH], 0.0, out.dtype.element_ty, vrow))
        return

    ok = gl.arange(0, KP, tcol)
    s_ptr = state + (slot * state_slot + hv * (V * K)) + (ov[:, None] * K + ok[None, :])
    if STAGED:
        staged = ()  # one buffer a chunk: the compiler puts a barrier between two copies into one buffer
        for c in gl.static_range(CHUNKS):
            staged = staged + (gl.allocate_shared_memory(state.dtype.element_ty, [CH, KP], row_major()),)
            if K == KP:
                copy_to_shared(staged[c], s_ptr + c * (CH * K))
            else:
                copy_to_shared(staged[c], s_ptr + c * (CH * K), mask=(ok < K)[None, :])
            async_copy.commit_group()
    else:
        s_next = blocks.load_columns(s_ptr, ok[None, :], K, KP)
    row_ptr = qkv + n * qkv_row
    q = blocks.load_columns(row_ptr + h * K + ok, ok, K, KP).to(gl.float32)
    k = blocks.load_columns(row_ptr + (H + h) * K + ok, ok, K, KP).to(gl.float32)
    v = ()
    for c in gl.static_range(CHUNKS):
        v = v + (gl.load(row_ptr + 2 * H * K + hv * V + c * CH + ov),)
    rate = blocks.decay_rate(gl.load(A_log + hv))
    beta = beta_scale * blocks.sigmoid(gl.load(b + n * b_row + hv * b_head).to(gl.float32))
    if KDA:
        og = gl.arange(0, KP, gcol)
        x = blocks.load_columns(a + n * a_row + hv * a_head + og * a_chan, og, K, KP).to(gl.float32)
        x += blocks.load_columns(dt_bias + hv * K + og, og, K, KP).to(gl.float32)
        decay = gl.convert_layout(blocks.exp(blocks.log_decay(x, rate, lower_bound, BOUNDED)), tcol)
    else:
        x = gl.load(a + n * a_row + hv * a_head).to(gl.float32) + gl.load(dt_bias + hv).to(gl.float32)
        decay = blocks.exp(blocks.log_decay(x, rate, lower_bound, BOUNDED))
    q_by, k_by, kq = blocks.norms(q, k, scale, L2NORM)  # applied to the sums, not to the vectors

    for c in gl.static_range(CHUNKS):
        at = c * CH
        if STAGED:
            async_copy.wait_group(CHUNKS - 1 - c)
            s = staged[c].load(blk).to(gl.float32)
        else:
            s = s_next.to(gl.float32)
            if c + 1 < CHUNKS:
                s_next = blocks.load_columns(s_ptr + (at + CH) * K, ok[None, :], K, KP)
        s = s * (decay[None, :] if KDA else decay)
        sq = gl.sum(s * q[None, :], 1) * q_by
        sk = gl.sum(s * k[None, :], 1) * k_by
        d = beta * (v[c].to(gl.float32) - sk)
        gl.store(out_ptr + at, (sq + d * kq).to(out.dtype.element_ty))
        s += (d * k_by)[:, None] * k[None, :]
        blocks.store_columns(s_ptr + at * K, blocks.to_state(s, state.dtype.element_ty), ok[None, :], K, KP)
