# mypy: ignore-errors
# ruff: noqa: RUF005 - no unpacking in kernels, and a constant `if` stands alone
"""A window of T tokens on a ring: a program serves one value head of a row, whose whole state it reads.

The copy engine brings the state, tiles of [CH, K], into BUFFERS buffers while gates, weights and all products of
tokens and records with each other are formed. A tile is then read by 2T vectors at once, and folded in a row that
flushes. The triangular system is solved by the thread that owns a row of V, for all tokens.

New records of a row that flushes may overwrite those that are folded, so they are written last, by the program that
has read the old ones. Keys belong to all value heads of a key head: where there are several, keys go into the ring by a
launch of their own (`append_keys`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import (
    as_rows,
    as_vectors,
    barrier_layout,
    flat,
    load_tile,
    one_by_one,
    ring_k_layout,
    row_major,
    state_layout,
    tile_layout,
)
from replayssm.kernels.gluon.verify_parts import (
    block_barrier,
    dots_layout,
    effects,
    keys_layout,
    product,
    product_fma,
    row_layout,
    token_layout,
    vectors_layout,
)


@gluon.jit
def weigh_records(
    k_base, g_base, kws, pairs, xs, coefs, count, q, k, K: gl.constexpr, LP: gl.constexpr, TP: gl.constexpr,
    KDA: gl.constexpr, L2NORM: gl.constexpr, NW: gl.constexpr, xl: gl.constexpr,
):  # fmt: skip
    """kws [LP, K]: the records' k̂, decayed to the window's start, newest first. coefs [2·TP, LP]: their products with
    q and k, which come decayed from there. xs [2·TP, K]: q and k decayed from the checkpoint on.

    Returns the decay of the checkpoint [K]. pairs [2·TP, K] is in use until then.
    """
    kl: gl.constexpr = ring_k_layout(LP, K, NW)
    pl: gl.constexpr = dots_layout(LP, NW)
    weighted, total = blocks.weighted_records(k_base, g_base, count, K, K, LP, KDA, L2NORM, kl)
    kws.store(weighted)
    pairs.slice(0, TP).store(q)
    pairs.slice(TP, TP).store(k)
    decay = gl.convert_layout(total, gl.SliceLayout(0, xl))[None, :]
    both = gl.permute(gl.join(q * decay, k * decay), (2, 0, 1))
    xs.store(gl.reshape(both, [2 * TP, K]))
    records = kws.load(gl.SliceLayout(0, pl))
    for i in gl.static_range(2):
        x = pairs.slice(i * TP, TP).load(gl.SliceLayout(1, pl))
        coefs.slice(i * TP, TP).store(gl.sum(x[:, None, :] * records[None, :, :], 2))
    return total


@gluon.jit
def solve(
    ys, coefs, lowers, betas, d_old, v, d_ptr, out_ptr, begin, count, out_token,
    T: gl.constexpr, TP: gl.constexpr, LP: gl.constexpr, V: gl.constexpr, rl: gl.constexpr,
):  # fmt: skip
    """Outputs and d of a value head, a thread for each row of V: ys [2·TP, V] are the readouts of the checkpoint.

    d_i = β_i (v_i - p_i) - Σ_{j<i} A_ij d_j and o_i = r_i + Σ_{j<=i} B_ij d_j, p and r with the records' part.
    """
    rows: gl.constexpr = gl.SliceLayout(1, rl)
    vrow = gl.arange(0, V, rows)
    lower = one_by_one(lowers, 2 * TP * TP)
    readouts, coef = as_vectors(ys, 2 * TP, V), as_rows(coefs, 2 * TP, LP)
    beta = one_by_one(betas, TP)
    d = ()
    for i in gl.static_range(T):
        read = readouts.index(TP + i).load(rows) + gl.sum(d_old * coef.index(TP + i).load(rl), 1)
        now = beta.index(i).load(rows) * (v[i].to(gl.float32) - read)
        for j in gl.static_range(i):
            now -= lower.index((TP + j) * TP + i).load(rows) * d[j]
        d = d + (now,)
        o = readouts.index(i).load(rows) + gl.sum(d_old * coef.index(i).load(rl), 1)
        for j in gl.static_range(i + 1):
            o += lower.index(j * TP + i).load(rows) * d[j]
        o = gl.where(i < count, o, 0.0)
        gl.store(out_ptr + i * out_token, o.to(out_ptr.dtype.element_ty))
        gl.store(d_ptr + (begin + i) * V, now, mask=(vrow >= 0) & (i < count))


@gluon.jit
def verify(
    state_desc, qkv, a, b, A_log, dt_bias, scale, state, d_ring, k_ring, g_ring, out, slots, write_pos, counts, force,
    lower_bound, beta_scale, slot_rows, qkv_row, qkv_token, a_row, a_token, a_head, a_chan, b_row, b_token, b_head,
    out_row, out_token, state_slot, d_slot, k_slot, g_slot,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, L: gl.constexpr, LP: gl.constexpr,
    T: gl.constexpr, TP: gl.constexpr, KDA: gl.constexpr, BOUNDED: gl.constexpr, L2NORM: gl.constexpr,
    FORCE: gl.constexpr, CH: gl.constexpr, BUFFERS: gl.constexpr, NW: gl.constexpr,
    TENSOR: gl.constexpr,
):  # fmt: skip
    """See `backend.replay_verify`. state_desc: the pool as rows of K, `slot_rows` of them a slot, in boxes of [CH, K].

    `TP` and `LP`: T and L rounded up to a power of two, T to the number of warps at least, L to 8.
    """
    dtype: gl.constexpr = state.dtype.element_ty
    ELEM: gl.constexpr = dtype.primitive_bitwidth // 8
    blk: gl.constexpr = state_layout(CH, K, ELEM, NW)
    xl: gl.constexpr = token_layout(K, NW)
    rl: gl.constexpr = row_layout(LP, NW)
    R: gl.constexpr = HV // H
    CHUNKS: gl.constexpr = V // CH
    N: gl.constexpr = 2 * TP

    gdc_wait()  # before anything of earlier kernels is read or written
    pid = gl.program_id(0)
    hv = pid % HV
    h = hv // R
    n = (pid // HV).to(gl.int64)
    slot = gl.load(slots + n)
    vrow = gl.arange(0, V, gl.SliceLayout(1, rl))
    out_ptr = out + n * out_row + hv * V + vrow
    if slot < 0:
        for i in gl.static_range(T):
            gl.store(out_ptr + i * out_token, gl.full([V], 0.0, out.dtype.element_ty, gl.SliceLayout(1, rl)))
        return

    states = gl.allocate_shared_memory(dtype, [BUFFERS, CH, K], tile_layout(CH, K, dtype))
    bars = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], barrier_layout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(bars.index(i), count=1)
    block_barrier()
    first_row = slot * slot_rows + hv * V
    for i in gl.static_range(BUFFERS):
        mbarrier.expect(bars.index(i), CH * K * ELEM)
        load_tile(state_desc, [first_row + i * CH, 0], bars.index(i), states.index(i))
    slot = slot.to(gl.int64)

    m = gl.load(counts + n)
    wp = gl.load(write_pos + n)
    flush = wp + m >= L
    if FORCE:
        flush = flush | (gl.load(force + n) != 0)
    begin = gl.where(flush, 0, wp)
    token = gl.arange(0, TP, gl.SliceLayout(1, xl))
    col = gl.arange(0, K, gl.SliceLayout(0, xl))
    alive = token < m
    here = alive[:, None] & (col >= 0)[None, :]
    t = token.to(gl.int64)
    q_ptr = qkv + n * qkv_row + h * K + (t * qkv_token)[:, None] + col[None, :]
    k_own = gl.load(q_ptr + H * K, mask=here, other=0.0)
    q, k = gl.load(q_ptr, mask=here, other=0.0).to(gl.float32), k_own.to(gl.float32)
    beta = gl.load(b + n * b_row + t * b_token + hv * b_head, mask=alive, other=0.0).to(gl.float32)
    if KDA:
        x_ptr = a + n * a_row + hv * a_head + (t * a_token)[:, None] + (col * a_chan)[None, :]
        x = gl.load(x_ptr, mask=here, other=0.0).to(gl.float32)
        x += gl.load(dt_bias + hv * K + col).to(gl.float32)[None, :]
    else:
        x = gl.load(a + n * a_row + t * a_token + hv * a_head, mask=alive, other=0.0).to(gl.float32)
        x += gl.load(dt_bias + hv).to(gl.float32)
    rate = blocks.decay_rate(gl.load(A_log + hv))
    k_base = k_ring + slot * k_slot + h * (L * K)
    d_base = d_ring + slot * d_slot + hv * (L * V)
    g_base = g_ring + slot * g_slot + hv * (L * K if KDA else L)
    record = blocks.newest_first(LP, gl.SliceLayout(0, rl))
    there = (record < wp)[None, :] & (vrow >= 0)[:, None]
    d_old = gl.load(d_base + record[None, :] * V + vrow[:, None], mask=there, other=0.0)
    v_ptr = qkv + n * qkv_row + 2 * H * K + hv * V + vrow
    v = ()
    for i in gl.static_range(T):
        v = v + (gl.load(v_ptr + i * qkv_token, mask=(vrow >= 0) & (i < m), other=0.0),)

    if L2NORM:
        q = q * (scale * gl.rsqrt(gl.sum(q * q, 1) + blocks.L2_EPS))[:, None]
        k = k * gl.rsqrt(gl.sum(k * k, 1) + blocks.L2_EPS)[:, None]
    else:
        q = q * scale
    beta = gl.where(alive, beta_scale * blocks.sigmoid(beta), 0.0)
    g_own = blocks.log_decay(x, rate, lower_bound, BOUNDED)
    if KDA:
        g_own = gl.where(here, g_own, 0.0)
        g = g_own
    else:
        g_own = gl.where(alive, g_own, 0.0)
        g = gl.where(here, g_own[:, None], 0.0)

    pairs = gl.allocate_shared_memory(gl.float32, [N, K], row_major())
    betas = gl.allocate_shared_memory(gl.float32, [TP], flat())
    betas.store(beta)
    lowers = gl.allocate_shared_memory(gl.float32, [N, TP], flat())
    effects(pairs, lowers, q, k, g, beta, TP, T, K, xl)
    since = blocks.exp(gl.associative_scan(g, 0, blocks.add))
    kws = gl.allocate_shared_memory(gl.float32, [LP, K], row_major())
    xs = gl.allocate_shared_memory(gl.float32, [N, K], vectors_layout(TENSOR))
    coefs = gl.allocate_shared_memory(gl.float32, [N, LP], row_major())
    decay = weigh_records(
        k_base, g_base, kws, pairs, xs, coefs, wp, q * since, k * since, K, LP, TP, KDA, L2NORM, NW, xl
    )  # fmt: skip

    ys = gl.allocate_shared_memory(gl.float32, [N, V], row_major())
    for c in gl.static_range(CHUNKS):
        tile = states.index(c % BUFFERS)
        mbarrier.wait(bars.index(c % BUFFERS), c // BUFFERS & 1)
        if TENSOR:
            ys.slice(c * CH, CH, dim=1).permute([1, 0]).store(product(tile, xs, dtype, CH, K, N, NW))
        else:
            product_fma(tile, xs, ys, c * CH, CH, K, V, T, TP, blk)
        if flush & (wp > 0):
            row = c * CH + gl.arange(0, CH, gl.SliceLayout(1, blk))
            chan = gl.arange(0, K, gl.SliceLayout(0, blk))
            rows = as_rows(kws, LP, K)
            s = tile.load(blk).to(gl.float32) * gl.convert_layout(decay, gl.SliceLayout(0, blk))[None, :]
            for j in range(wp):
                s += gl.load(d_base + j * V + row)[:, None] * rows.index(LP - 1 - j).load(blk)
            gl.store(state + (slot * state_slot + hv * (V * K)) + (row[:, None] * K + chan[None, :]),
                     blocks.to_state(s, dtype))  # fmt: skip
        if c + BUFFERS < CHUNKS:
            block_barrier()  # all have read the tile
            mbarrier.expect(bars.index(c % BUFFERS), CH * K * ELEM)
            load_tile(state_desc, [first_row + (c + BUFFERS) * CH, 0], bars.index(c % BUFFERS), tile)

    block_barrier()  # nobody reads old records of this head any more
    solve(
        ys, coefs, lowers, betas, d_old, v, d_base + vrow, out_ptr, begin, m, out_token, T, TP, LP, V, rl
    )  # fmt: skip
    if KDA:
        gl.store(g_base + (begin + token)[:, None] * K + col[None, :], g_own, mask=here)
    else:
        gl.store(g_base + begin + token, g_own, mask=alive)
    if R == 1:
        gl.store(k_base + (begin + token)[:, None] * K + col[None, :], k_own, mask=here)


@gluon.jit
def append_keys(
    qkv, k_ring, slots, write_pos, counts, force, qkv_row, qkv_token, k_slot,
    H: gl.constexpr, K: gl.constexpr, L: gl.constexpr, T: gl.constexpr, FORCE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Raw k of one token of a row into the ring, in all key heads. `WIDE`: H·K rounded up to a power of two."""
    gdc_wait()
    pid = gl.program_id(0)
    n = (pid // T).to(gl.int64)
    i = pid % T
    slot = gl.load(slots + n).to(gl.int64)
    m = gl.load(counts + n)
    if (slot < 0) | (i >= m):
        return
    wp = gl.load(write_pos + n)
    flush = wp + m >= L
    if FORCE:
        flush = flush | (gl.load(force + n) != 0)
    at = gl.where(flush, 0, wp) + i
    col = gl.arange(0, WIDE, keys_layout(WIDE, 4))
    inside = col < H * K
    k = gl.load(qkv + n * qkv_row + i.to(gl.int64) * qkv_token + H * K + col, mask=inside, other=0.0)
    gl.store(k_ring + slot * k_slot + col // K * (L * K) + at * K + col % K, k, mask=inside)
