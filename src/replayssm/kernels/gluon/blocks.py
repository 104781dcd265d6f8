# mypy: ignore-errors
"""The parts that all kernels share: gates, norms, ring weights, fold. Formulas: docs/mathematics.md.

Every decay is e to a number <= 0, taken after masking. All arithmetic is fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

L2_EPS = gl.constexpr(1e-6)
# exp() of anything below about -104 is 0 in fp32, so a floor here changes no decay. It turns -inf into a number.
LOG_DECAY_FLOOR = gl.constexpr(-200.0)
A_LOG_CEILING = gl.constexpr(88.0)
FP16_MAX = gl.constexpr(65504.0)


@gluon.jit
def exp(x):
    """e^x by the hardware's 2^x, which flushes what is below 2^-126 to zero instead of handling it apart."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def softplus(x):
    """log(1 + e^x). With z = e/(2+e), log(1+e) = 2·atanh(z): a short series, since z <= 1/3.

    The hardware logarithm has an absolute error near 1, which a slow gate would repeat at every step.
    """
    e = exp(gl.where(x < 0, x, -x))
    z = e / (2.0 + e)
    y = z * z
    p = 1.0 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13))))))
    return gl.where(x > 0, x, 0.0) + 2.0 * z * p


@gluon.jit
def decay_rate(A_log):
    """exp(A_log), finite: an infinite rate times a gate of 0 would be NaN."""
    A_log = A_log.to(gl.float32)
    return exp(gl.where(A_log > A_LOG_CEILING, A_LOG_CEILING, A_log))


@gluon.jit
def log_decay(x, rate, lower_bound, BOUNDED: gl.constexpr):
    """g <= 0 from x = a + dt_bias and rate = exp(A_log)."""
    if BOUNDED:
        g = lower_bound / (1.0 + exp(-rate * x))
    else:
        g = -rate * softplus(x)
    return gl.where(g < LOG_DECAY_FLOOR, LOG_DECAY_FLOOR, g)  # a select lets NaN through; a maximum would hide it


@gluon.jit
def sigmoid(x):
    """1/(1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


@gluon.jit
def norms(q, k, scale, L2NORM: gl.constexpr):
    """Factors that make q̂ and k̂ of raw q and k, and k̂·q̂; one pass over K."""
    q_norm, k_norm, kq = gl.reduce((q * q, k * k, q * k), 0, _add3)
    q_by, k_by = scale, 1.0
    if L2NORM:
        q_by, k_by = scale * gl.rsqrt(q_norm + L2_EPS), gl.rsqrt(k_norm + L2_EPS)
    return q_by, k_by, kq * q_by * k_by


@gluon.jit
def lane_sums(x, LANES: gl.constexpr, VEC: gl.constexpr):
    """[BV, N] -> [BV, LANES]: what one lane holds of a row is added up, so that several sums share their exchange."""
    x = gl.reshape(x, [x.shape[0], x.shape[1] // (LANES * VEC), LANES, VEC])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def to_state(s, dtype: gl.constexpr):
    """Round to the storage dtype. fp16 saturates: a state past 65504 must not become inf."""
    if dtype == gl.float16:
        s = gl.where(s > FP16_MAX, FP16_MAX, s)
        s = gl.where(s < -FP16_MAX, -FP16_MAX, s)
    return s.to(dtype)


@gluon.jit
def add(x, y):
    """For scans."""
    return x + y


@gluon.jit
def _add3(a, b, c, x, y, z):
    return a + x, b + y, c + z


@gluon.jit
def newest_first(LP: gl.constexpr, layout: gl.constexpr):
    """Record in each row of a tile [LP, …]. A running sum down the tile then adds up what comes after each record."""
    return LP - 1 - gl.arange(0, LP, layout)


@gluon.jit
def load_columns(pointers, col, K: gl.constexpr, KP: gl.constexpr):
    """What is stored of a tile or vector over K; zero in columns K … KP-1, which only pad it to a power of two."""
    if K == KP:
        return gl.load(pointers)
    else:
        return gl.load(pointers, mask=col < K, other=0.0)


@gluon.jit
def store_columns(pointers, value, col, K: gl.constexpr, KP: gl.constexpr):
    """The counterpart of `load_columns`."""
    if K == KP:
        gl.store(pointers, value)
    else:
        gl.store(pointers, value, mask=col < K)


@gluon.jit
def _records(ring, row, count, K: gl.constexpr, KP: gl.constexpr, kl: gl.constexpr):
    col = gl.arange(0, KP, gl.SliceLayout(0, kl))
    there = (row < count)[:, None]
    if K != KP:
        there = there & (col < K)[None, :]
    return gl.load(ring + row[:, None] * K + col[None, :], mask=there, other=0.0)


@gluon.jit
def load_ring_k(k_ring, count, K: gl.constexpr, KP: gl.constexpr, LP: gl.constexpr, kl: gl.constexpr):
    """Raw k of the records [LP, KP], newest first, zero at or past `count`; dead rows are never read."""
    return _records(k_ring, newest_first(LP, gl.SliceLayout(1, kl)), count, K, KP, kl)


@gluon.jit
def load_next_g(g_ring, count, K: gl.constexpr, KP: gl.constexpr, LP: gl.constexpr, kl: gl.constexpr):
    """KDA gates shifted by one record: the row of j holds g of record j + 1, zero at or past `count`. [LP, KP]"""
    return _records(g_ring, newest_first(LP, gl.SliceLayout(1, kl)) + 1, count, K, KP, kl)


@gluon.jit
def head_decays(g_ring, row, count, g_now, LP: gl.constexpr):
    """GDN: decay from each record `row` to now [LP], and from the checkpoint (scalar).

    Each gate is added to the records before it: a sum of later gates keeps its digits after a strong decay, a
    difference of cumulative sums would not.
    """
    tail = gl.where(row >= 0, g_now, 0.0)
    total = g_now
    if LP <= 16:
        for i in gl.static_range(LP):
            g = gl.load(g_ring + i, mask=i < count, other=0.0)
            tail += gl.where(row < i, g, 0.0)
            total += g
    else:
        for i in range(count):
            g = gl.load(g_ring + i)
            tail += gl.where(row < i, g, 0.0)
            total += g
    return exp(tail), exp(total)


@gluon.jit
def channel_decays(g_ring, g_next, count, g_now, K: gl.constexpr, KP: gl.constexpr, kl: gl.constexpr):
    """KDA: decay from each record to now [LP, KP], and from the checkpoint [KP]. `g_next` is that of `load_next_g`."""
    col = gl.arange(0, KP, gl.SliceLayout(0, kl))
    first = gl.load(g_ring + col, mask=(col < K) & (count > 0), other=0.0)
    tail = gl.associative_scan(g_next, 0, add)
    total = gl.sum(g_next, 0) + first + g_now
    return exp(tail + g_now[None, :]), exp(total)


@gluon.jit
def ring_dots(k_raw, weighted, q, k, L2NORM: gl.constexpr):
    """1/‖k_j‖ and the dot products of the weighted raw records with q̂ and k̂, all [LP]; one pass across warps."""
    n2, dq, dk = gl.reduce((k_raw * k_raw, weighted * q[None, :], weighted * k[None, :]), 1, _add3)
    if L2NORM:
        inv = gl.rsqrt(n2 + L2_EPS)
    else:
        inv = gl.where(n2 > 0, 1.0, 1.0)  # ones, also where n2 is infinite
    return inv, dq * inv, dk * inv


@gluon.jit
def stash_records(tile, weighted, inv, k_now, count, LP: gl.constexpr, kl: gl.constexpr):
    """Write the records' weighted k̂ [LP, KP] to shared memory, and k̂ of the current token as record `count`."""
    row = newest_first(LP, gl.SliceLayout(1, kl))
    tile.store(gl.where((row == count)[:, None], k_now[None, :], weighted * inv[:, None]))


@gluon.jit
def weighted_records(k_ring, g_ring, count, K: gl.constexpr, KP: gl.constexpr, LP: gl.constexpr, KDA: gl.constexpr,
                     L2NORM: gl.constexpr, kl: gl.constexpr):  # fmt: skip
    """w_j ∘ k̂_j of records 0 … count-1 [LP, KP], and the decay of the checkpoint [KP], decayed to the last record."""
    k_raw = load_ring_k(k_ring, count, K, KP, LP, kl).to(gl.float32)
    zero = gl.arange(0, KP, gl.SliceLayout(0, kl)) * 0.0
    if KDA:
        g_next = load_next_g(g_ring, count, K, KP, LP, kl)
        w, decay = channel_decays(g_ring, g_next, count, zero, K, KP, kl)
        weighted = k_raw * w
    else:
        w, total = head_decays(g_ring, newest_first(LP, gl.SliceLayout(1, kl)), count, 0.0, LP)
        decay = zero + total
        weighted = k_raw * w[:, None]
    if L2NORM:
        weighted = weighted * gl.rsqrt(gl.sum(k_raw * k_raw, 1) + L2_EPS)[:, None]
    return weighted, decay


@gluon.jit
def fold_fma(s, rows, d_rows, d_now, count, V: gl.constexpr, LP: gl.constexpr, blk: gl.constexpr):
    """s + Σ_{j<count} d_j (w_j ∘ k̂_j)ᵀ + d_now k̂ᵀ in fp32 on a register tile.

    rows: shared [LP, 1, KP] from `stash_records`; d_rows: pointers [BV] to record 0.
    """
    for j in range(count):
        d = gl.load(d_rows + j * V)
        s += d[:, None] * rows.index(LP - 1 - j).load(blk)
    return s + d_now[:, None] * rows.index(LP - 1 - count).load(blk)
