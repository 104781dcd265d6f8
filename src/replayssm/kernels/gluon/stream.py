# mypy: ignore-errors
# ruff: noqa: RUF005 - no unpacking in kernels, and a constant `if` stands alone
"""Replay decode as a stream: a few programs per multiprocessor, with warps of three kinds that do not wait in turn.

`load` copies tiles [BV, K] of the checkpoint and their part of the d ring into STAGES buffers in shared memory.
`prepare`, one warp or two that take turns, does what does not depend on K times V: norms, gates, dot products with the
ring, appending k and g. `consume` forms output and d of a tile, appends d or folds the ring.
A program takes every G-th tile. Its i-th tile uses stage i % STAGES, in phase i // STAGES of that stage's barriers.
`full`: the tile and what was prepared for it are there. `empty`: they may be overwritten.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import (
    as_columns,
    as_rows,
    barrier_layout,
    channel_layout,
    copy_to_shared,
    flat,
    flat_layout,
    load_tile,
    one_by_one,
    ring_copy_layout,
    ring_d_layout,
    ring_k_layout,
    row_major,
    state_layout,
    tile_layout,
)

PART = gl.constexpr(8)  # records that `prepare` holds at once


@gluon.jit
def place(item, HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Row of the batch, value head and first row of V of a tile."""
    TILES: gl.constexpr = V // BV
    return (item // (TILES * HV)).to(gl.int64), item // TILES % HV, item % TILES * BV


@gluon.jit
def load(
    state_desc, d_ring, slots, write_pos, items, slot_rows, d_slot, states, ds, full, empty,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, LP: gl.constexpr, BV: gl.constexpr,
    CH: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """A padding row copies the checkpoint of slot 0, which nobody looks at, and no records."""
    CHUNKS: gl.constexpr = BV // CH
    dcopy: gl.constexpr = ring_copy_layout(CH, 1)
    rec = blocks.newest_first(LP, gl.SliceLayout(1, dcopy))
    drow = gl.arange(0, CH, gl.SliceLayout(0, dcopy))
    offsets = rec[:, None] * V + drow[None, :]
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    n, hv, row0 = place(first, HV, V, BV)
    slot, count = gl.load(slots + n), gl.load(write_pos + n)
    for i in range(0, (items - first + programs - 1) // programs):
        at = gl.where(slot >= 0, slot, 0)
        live = (rec < gl.where(slot >= 0, count, 0))[:, None]
        row = at * slot_rows + hv * V + row0
        pointers = d_ring + (at.to(gl.int64) * d_slot + hv * (L * V) + row0) + offsets
        after = first + (i + 1) * programs
        n, hv, row0 = place(gl.where(after < items, after, first), HV, V, BV)
        slot, count = gl.load(slots + n), gl.load(write_pos + n)  # of the next tile: this wait is long enough
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        for c in gl.static_range(CHUNKS):
            load_tile(state_desc, [row + c * CH, 0], full.index(stage), states.index(stage * CHUNKS + c))
        for c in gl.static_range(CHUNKS):
            copy_to_shared(ds.index(stage * CHUNKS + c), pointers + c * CH, mask=live)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def weigh(k_base, g_base, count, g, later, q, k, base, K: gl.constexpr, KDA: gl.constexpr, L2NORM: gl.constexpr,
          kl: gl.constexpr, cl: gl.constexpr):  # fmt: skip
    """Records base … base + PART - 1, newest first: raw k, decay to now, 1/norm, dot products with q̂ and k̂; and the
    sum of their gates and of those after them. `later`: that sum of the newer records. KDA; GDN has its weights.
    """
    k_raw = blocks.load_ring_k(k_base + base * K, count - base, K, K, PART, kl).to(gl.float32)
    w = k_raw
    if KDA:
        g_next = blocks.load_next_g(g_base + base * K, count - base, K, K, PART, cl)
        w = blocks.exp(gl.associative_scan(g_next, 0, blocks.add) + (g + later)[None, :])
        w = k_raw * gl.convert_layout(w, kl)
        later += gl.sum(g_next, 0)
    inv, dq, dk = blocks.ring_dots(k_raw, w, q, k, L2NORM)
    return w, inv, dq, dk, later


@gluon.jit
def prepare(
    qkv, a, b, A_log, dt_bias, scale, k_ring, g_ring, slots, write_pos, force, lower_bound, beta_scale, items, qkv_row,
    a_row, a_head, a_chan, b_row, b_head, k_slot, g_slot, heads, rests, values, k_tiles, decays, full, empty,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, LP: gl.constexpr,
    KDA: gl.constexpr, BOUNDED: gl.constexpr, L2NORM: gl.constexpr, FORCE: gl.constexpr, BV: gl.constexpr,
    CH: gl.constexpr, STAGES: gl.constexpr, WORKERS: gl.constexpr, WORKER: gl.constexpr,
):  # fmt: skip
    """heads [STAGES, 2·K]: decayed q̂ and k̂. rests [STAGES, 4·LP]: ring coefficients of q̂ and of k̂; beta, k̂·q̂.
    values [STAGES·BV/CH, CH]: v. For a row that flushes also k_tiles [STAGES, LP, K]: the weighted k̂ of its records,
    and decays [STAGES, K]: of the checkpoint.
    """
    kl: gl.constexpr = ring_k_layout(PART, K, 1)  # dot products over K
    cl: gl.constexpr = channel_layout(PART, K)  # sums over records, and all vectors over K
    R: gl.constexpr = HV // H
    PARTS: gl.constexpr = LP // PART
    col = gl.arange(0, K, gl.SliceLayout(0, cl))
    kcol = gl.arange(0, K, gl.SliceLayout(0, kl))
    vcol = gl.arange(0, CH, flat_layout(1))
    zero = gl.where(col >= 0, 0.0, 1.0)
    part = blocks.newest_first(PART, gl.SliceLayout(1, kl))
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    n, hv, row0 = place(gl.where(first + WORKER * programs < items, first + WORKER * programs, first), HV, V, BV)
    slot, wp = gl.load(slots + n).to(gl.int64), gl.load(write_pos + n)
    for i in range(WORKER, (items - first + programs - 1) // programs, WORKERS):
        h = hv // R
        live = slot >= 0
        slot = gl.where(live, slot, 0)
        count = gl.where(live, wp, 0)
        flush = wp == L - 1
        if FORCE:
            flush = flush | (gl.load(force + n) != 0)
        q_ptr = qkv + n * qkv_row + h * K
        k_ptr = q_ptr + H * K
        k_own = gl.load(k_ptr + col)
        q, k = gl.load(q_ptr + col).to(gl.float32), k_own.to(gl.float32)
        v = ()
        for c in gl.static_range(BV // CH):
            v = v + (gl.load(qkv + n * qkv_row + (2 * H * K + hv * V + row0 + c * CH) + vcol),)
        rate = blocks.decay_rate(gl.load(A_log + hv))
        beta = beta_scale * blocks.sigmoid(gl.load(b + n * b_row + hv * b_head).to(gl.float32))
        if KDA:
            x = gl.load(a + n * a_row + hv * a_head + col * a_chan).to(gl.float32)
            x += gl.load(dt_bias + hv * K + col).to(gl.float32)
        else:
            x = gl.load(a + n * a_row + hv * a_head).to(gl.float32) + gl.load(dt_bias + hv).to(gl.float32)
        g = blocks.log_decay(x, rate, lower_bound, BOUNDED)
        q_by, k_by, kq = blocks.norms(q, k, scale, L2NORM)
        q, k = q * q_by, k * k_by
        cq, ck = (), ()
        k_base = k_ring + slot * k_slot + h * (L * K)
        g_base = g_ring + slot * g_slot + hv * (L * K if KDA else L)
        q_dot = gl.load(q_ptr + kcol).to(gl.float32) * q_by
        k_dot = gl.load(k_ptr + kcol).to(gl.float32) * k_by
        later = zero
        for p in gl.static_range(PARTS):
            base = LP - (p + 1) * PART
            w, inv, dq, dk, later = weigh(k_base, g_base, count, g, later, q_dot, k_dot, base, K, KDA, L2NORM, kl,
                                          cl)  # fmt: skip
            if not KDA:
                decayed, total = blocks.head_decays(g_base, base + part, count, g, LP)
                dq, dk, inv = dq * decayed, dk * decayed, inv * decayed
            cq, ck = cq + (dq,), ck + (dk,)
        if KDA:
            g_first = gl.load(g_base + col, mask=(col >= 0) & (count > 0), other=0.0)
            decay = blocks.exp(later + g_first + g)
        else:
            decay = total + zero
        if live & (flush == 0) & (row0 == 0):
            if KDA:
                gl.store(g_base + wp * K + col, g)
            else:
                gl.store(g_base + wp, g)
            if hv % R == 0:
                gl.store(k_base + wp * K + col, k_own)

        far = first + (i + WORKERS) * programs
        n, hv, row0 = place(gl.where(far < items, far, first), HV, V, BV)
        next_slot, next_wp = gl.load(slots + n).to(gl.int64), gl.load(write_pos + n)
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
        head = heads.index(stage)
        rest = rests.index(stage)
        head.slice(0, K).store(q * decay)
        head.slice(K, K).store(k * decay)
        for p in gl.static_range(PARTS):
            rest.slice(p * PART, PART).store(cq[p])
            rest.slice(LP + p * PART, PART).store(ck[p])
        rest.slice(2 * LP, PART).store(gl.where(part >= 0, beta, 0.0))
        rest.slice(3 * LP, PART).store(gl.where(part >= 0, kq, 0.0))
        for c in gl.static_range(BV // CH):
            values.index(stage * (BV // CH) + c).store(v[c].to(gl.float32))
        if live & flush:
            decays.index(stage).store(decay)
            k_tile = k_tiles.index(stage)
            later = zero
            for p in gl.static_range(PARTS):
                base = LP - (p + 1) * PART
                if PARTS > 1:  # what was computed above is gone
                    w, inv, dq, dk, later = weigh(k_base, g_base, count, g, later, q_dot, k_dot, base, K, KDA, L2NORM,
                                                  kl, cl)  # fmt: skip
                    if not KDA:
                        decayed, total = blocks.head_decays(g_base, base + part, count, g, LP)
                        inv = inv * decayed
                now = (base + part == wp)[:, None]
                k_tile.slice(p * PART, PART, dim=0).store(gl.where(now, k_dot[None, :], w * inv[:, None]))
        mbarrier.arrive(full.index(stage), count=1)
        slot, wp = next_slot, next_wp


@gluon.jit
def consume(
    state, d_ring, out, slots, write_pos, force, items, out_row, state_slot, d_slot, states, ds, heads, rests, values,
    k_tiles, decays, full, empty,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, LP: gl.constexpr, FORCE: gl.constexpr,
    BV: gl.constexpr, CH: gl.constexpr, NW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output and d of tile after tile."""
    ELEM: gl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    blk: gl.constexpr = state_layout(CH, K, ELEM, NW)
    dlay: gl.constexpr = ring_d_layout(CH, K, ELEM, NW)
    vrow: gl.constexpr = gl.SliceLayout(1, blk)
    tcol: gl.constexpr = gl.SliceLayout(0, blk)
    drec: gl.constexpr = gl.SliceLayout(0, dlay)
    VEC: gl.constexpr = 16 // ELEM
    LANES: gl.constexpr = min(8, K // VEC)
    CHUNKS: gl.constexpr = BV // CH
    UNROLL: gl.constexpr = 4
    scalars = one_by_one(rests, STAGES * 4 * LP)
    ov = gl.arange(0, CH, vrow)
    ok = gl.arange(0, K, tcol)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    n, hv, row0 = place(first, HV, V, BV)
    slot, wp, forced = gl.load(slots + n).to(gl.int64), gl.load(write_pos + n), gl.load(force + n)
    for i in range(0, (items - first + programs - 1) // programs):
        live = slot >= 0
        flush = wp == L - 1
        if FORCE:
            flush = flush | (forced != 0)
        flush = flush & live
        after = first + (i + 1) * programs
        n_next, hv_next, row_next = place(gl.where(after < items, after, first), HV, V, BV)
        slot_next, wp_next = gl.load(slots + n_next).to(gl.int64), gl.load(write_pos + n_next)
        forced = gl.load(force + n_next)  # of the next tile: this wait is long enough

        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        qe = heads.index(stage).slice(0, K).load(tcol)
        ke = heads.index(stage).slice(K, K).load(tcol)
        cq = rests.index(stage).slice(0, LP).load(drec)
        ck = rests.index(stage).slice(LP, LP).load(drec)
        beta = scalars.index(stage * (4 * LP) + 2 * LP).load(vrow)
        kq = scalars.index(stage * (4 * LP) + 3 * LP).load(vrow)
        for c in range(CHUNKS):  # not unrolled: the code of all warps together should stay in the instruction cache
            s = states.index(stage * CHUNKS + c).load(blk).to(gl.float32)
            dr = ds.index(stage * CHUNKS + c).permute([1, 0]).load(dlay)
            sq = gl.convert_layout(blocks.lane_sums(s * qe[None, :], LANES, VEC), dlay, assert_trivial=True)
            sk = gl.convert_layout(blocks.lane_sums(s * ke[None, :], LANES, VEC), dlay, assert_trivial=True)
            sq += gl.convert_layout(blocks.lane_sums(dr * cq[None, :], LANES, 1), dlay, assert_trivial=True)
            sk += gl.convert_layout(blocks.lane_sums(dr * ck[None, :], LANES, 1), dlay, assert_trivial=True)
            sq = gl.convert_layout(gl.sum(sq, 1), vrow, assert_trivial=True)
            sk = gl.convert_layout(gl.sum(sk, 1), vrow, assert_trivial=True)
            d = beta * (values.index(stage * CHUNKS + c).load(vrow) - sk)
            o = gl.where(live, sq + d * kq, 0.0)
            row = row0 + c * CH + ov
            gl.store(out + n * out_row + hv * V + row, o.to(out.dtype.element_ty))
            if flush:
                k_rows = as_rows(k_tiles.index(stage), LP, K)
                d_cols = as_columns(ds.index(stage * CHUNKS + c), LP, CH)
                decay = decays.index(stage).load(tcol)
                s = s * decay[None, :] + d[:, None] * k_rows.index(LP - 1 - wp).load(blk)
                for base in range(0, LP, UNROLL):  # d is zero where there is no record yet, also at the newest
                    for j in gl.static_range(UNROLL):
                        s += d_cols.index(base + j).load(blk) * k_rows.index(base + j).load(blk)
                gl.store(state + (slot * state_slot + hv * (V * K)) + (row[:, None] * K + ok[None, :]),
                         blocks.to_state(s, state.dtype.element_ty))  # fmt: skip
            elif live:
                gl.store(d_ring + (slot * d_slot + hv * (L * V) + wp * V) + row, d)
        mbarrier.arrive(empty.index(stage), count=1)
        n, hv, row0, slot, wp = n_next, hv_next, row_next, slot_next, wp_next


@gluon.jit
def replay_stream(
    state_desc, qkv, a, b, A_log, dt_bias, scale, state, d_ring, k_ring, g_ring, out, slots, write_pos, force,
    lower_bound, beta_scale, items, slot_rows, qkv_row, a_row, a_head, a_chan, b_row, b_head, out_row, state_slot,
    d_slot, k_slot, g_slot,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, LP: gl.constexpr,
    KDA: gl.constexpr, BOUNDED: gl.constexpr, L2NORM: gl.constexpr, FORCE: gl.constexpr, BV: gl.constexpr,
    CH: gl.constexpr, NW: gl.constexpr, STAGES: gl.constexpr, WORKERS: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """`items`: B·HV·V/BV tiles. state_desc: the pool as rows of K, `slot_rows` of them a slot, in boxes of [CH, K]."""
    CHUNKS: gl.constexpr = BV // CH
    dtype: gl.constexpr = state.dtype.element_ty
    BYTES: gl.constexpr = BV * K * dtype.primitive_bitwidth // 8
    states = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, CH, K], tile_layout(CH, K, dtype))
    ds = gl.allocate_shared_memory(gl.float32, [STAGES * CHUNKS, LP, CH], row_major())
    heads = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * K], flat())
    rests = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * LP], flat())
    values = gl.allocate_shared_memory(gl.float32, [STAGES * CHUNKS, CH], flat())
    k_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, LP, K], row_major())
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, K], flat())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=34)  # the tile, what was prepared, and each lane that copies d
        mbarrier.init(empty.index(i), count=1)
    gdc_wait()  # before anything of earlier kernels is read or written
    if WORKERS == 1:
        gl.warp_specialize(
            [
                (consume, (state, d_ring, out, slots, write_pos, force, items, out_row, state_slot, d_slot, states, ds,
                           heads, rests, values, k_tiles, decays, full, empty,
                           HV, K, V, L, LP, FORCE, BV, CH, NW, STAGES)),
                (load, (state_desc, d_ring, slots, write_pos, items, slot_rows, d_slot, states, ds, full, empty,
                        HV, K, V, L, LP, BV, CH, STAGES, BYTES)),
                (prepare, (qkv, a, b, A_log, dt_bias, scale, k_ring, g_ring, slots, write_pos, force, lower_bound,
                           beta_scale, items, qkv_row, a_row, a_head, a_chan, b_row, b_head, k_slot, g_slot, heads,
                           rests, values, k_tiles, decays, full, empty,
                           H, HV, K, V, L, LP, KDA, BOUNDED, L2NORM, FORCE, BV, CH, STAGES, 1, 0)),
            ],
            [1, 1], [REGS, REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (state, d_ring, out, slots, write_pos, force, items, out_row, state_slot, d_slot, states, ds,
                           heads, rests, values, k_tiles, decays, full, empty,
                           HV, K, V, L, LP, FORCE, BV, CH, NW, STAGES)),
                (load, (state_desc, d_ring, slots, write_pos, items, slot_rows, d_slot, states, ds, full, empty,
                        HV, K, V, L, LP, BV, CH, STAGES, BYTES)),
                (prepare, (qkv, a, b, A_log, dt_bias, scale, k_ring, g_ring, slots, write_pos, force, lower_bound,
                           beta_scale, items, qkv_row, a_row, a_head, a_chan, b_row, b_head, k_slot, g_slot, heads,
                           rests, values, k_tiles, decays, full, empty,
                           H, HV, K, V, L, LP, KDA, BOUNDED, L2NORM, FORCE, BV, CH, STAGES, 2, 0)),
                (prepare, (qkv, a, b, A_log, dt_bias, scale, k_ring, g_ring, slots, write_pos, force, lower_bound,
                           beta_scale, items, qkv_row, a_row, a_head, a_chan, b_row, b_head, k_slot, g_slot, heads,
                           rests, values, k_tiles, decays, full, empty,
                           H, HV, K, V, L, LP, KDA, BOUNDED, L2NORM, FORCE, BV, CH, STAGES, 2, 1)),
            ],
            [1, 1, 1], [REGS, REGS, REGS],
        )  # fmt: skip
