# mypy: ignore-errors
"""The parts that all kernels share: gates, norms, ring weights, fold. Formulas: docs/mathematics.md.

Every exponential is of a number <= 0 and is taken after masking. All arithmetic is fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.kernels.gluon.layouts import mma_layout

L2_EPS = gl.constexpr(1e-6)
# exp() of anything below about -104 is 0 in fp32, so a floor here changes no decay. It turns -inf into a number.
LOG_DECAY_FLOOR = gl.constexpr(-200.0)
FP16_MAX = gl.constexpr(65504.0)


@gluon.jit
def softplus(x):
    """log(1 + e^x). With z = e/(2+e), log(1+e) = 2·atanh(z): a short series, since z <= 1/3.

    The hardware logarithm has an absolute error near 1, which a slow gate would repeat at every step.
    """
    e = gl.exp(gl.where(x < 0, x, -x))
    z = e / (2.0 + e)
    y = z * z
    p = 1.0 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13))))))
    return gl.where(x > 0, x, 0.0) + 2.0 * z * p


@gluon.jit
def log_decay(x, rate, lower_bound, BOUNDED: gl.constexpr):
    """g <= 0 from x = a + dt_bias and rate = exp(A_log)."""
    if BOUNDED:
        g = lower_bound / (1.0 + gl.exp(-rate * x))
    else:
        g = -rate * softplus(x)
    return gl.where(g < LOG_DECAY_FLOOR, LOG_DECAY_FLOOR, g)  # a select lets NaN through; a maximum would hide it


@gluon.jit
def sigmoid(x):
    """1/(1 + e^-x)."""
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def inverse_norm(x, L2NORM: gl.constexpr):
    """rsqrt(Σx² + eps) of a vector, or 1."""
    r = 1.0
    if L2NORM:
        r = gl.rsqrt(gl.sum(x * x, 0) + L2_EPS)
    return r


@gluon.jit
def to_state(s, dtype: gl.constexpr):
    """Round to the storage dtype. fp16 saturates: a state past 65504 must not become inf."""
    if dtype == gl.float16:
        s = gl.where(s > FP16_MAX, FP16_MAX, s)
        s = gl.where(s < -FP16_MAX, -FP16_MAX, s)
    return s.to(dtype)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _add3(a, b, c, x, y, z):
    return a + x, b + y, c + z


@gluon.jit
def load_ring_k(k_ring, count, K: gl.constexpr, LP: gl.constexpr, kl: gl.constexpr):
    """Raw k of the records [LP, K], zero at or past `count`; dead rows are never read."""
    row = gl.arange(0, LP, gl.SliceLayout(1, kl))
    col = gl.arange(0, K, gl.SliceLayout(0, kl))
    return gl.load(k_ring + row[:, None] * K + col[None, :], mask=(row < count)[:, None], other=0.0)


@gluon.jit
def load_next_g(g_ring, count, K: gl.constexpr, LP: gl.constexpr, kl: gl.constexpr):
    """KDA gates shifted by one record: row j holds g of record j + 1, zero at or past `count`. [LP, K]"""
    row = gl.arange(0, LP, gl.SliceLayout(1, kl)) + 1
    col = gl.arange(0, K, gl.SliceLayout(0, kl))
    return gl.load(g_ring + row[:, None] * K + col[None, :], mask=(row < count)[:, None], other=0.0)


@gluon.jit
def head_decays(g_ring, count, g_now, LP: gl.constexpr, kl: gl.constexpr):
    """GDN: decay from each record to now [LP], and from the checkpoint (scalar).

    Each gate is added to the records before it: a sum of later gates keeps its digits after a strong decay, a
    difference of cumulative sums would not.
    """
    row = gl.arange(0, LP, gl.SliceLayout(1, kl))
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
    return gl.exp(tail), gl.exp(total)


@gluon.jit
def channel_decays(g_ring, g_next, count, g_now, K: gl.constexpr, LP: gl.constexpr, kl: gl.constexpr,
                   SCAN: gl.constexpr):  # fmt: skip
    """KDA: decay from each record to now [LP, K], and from the checkpoint [K]. `g_next` as `load_next_g` gives it."""
    col = gl.arange(0, K, gl.SliceLayout(0, kl))
    first = gl.load(g_ring + col, mask=(col >= 0) & (count > 0), other=0.0)
    if SCAN:
        tail = gl.associative_scan(g_next, 0, _add, reverse=True)
    else:
        row = gl.arange(0, LP, gl.SliceLayout(1, kl))
        tail = g_next * 0.0
        for i in range(1, count):
            g = gl.load(g_ring + i * K + col)
            tail += gl.where((row < i)[:, None], g[None, :], 0.0)
    total = gl.sum(g_next, 0) + first + g_now
    return gl.exp(tail + g_now[None, :]), gl.exp(total)


@gluon.jit
def ring_dots(k_raw, weighted, q, k, L2NORM: gl.constexpr):
    """1/‖k_j‖ and the dot products of the weighted raw records with q̂ and k̂, all [LP]; one pass across warps."""
    n2, dq, dk = gl.reduce((k_raw * k_raw, weighted * q[None, :], weighted * k[None, :]), 1, _add3)
    if L2NORM:
        inv = gl.rsqrt(n2 + L2_EPS)
    else:
        inv = n2 * 0.0 + 1.0
    return inv, dq * inv, dk * inv


@gluon.jit
def stash_records(tile, weighted, inv, k_now, count, LP: gl.constexpr, kl: gl.constexpr):
    """Write the records' weighted k̂ [LP, K] to shared memory, and k̂ of the current token as row `count`."""
    row = gl.arange(0, LP, gl.SliceLayout(1, kl))
    tile.store(gl.where((row == count)[:, None], k_now[None, :], weighted * inv[:, None]))


@gluon.jit
def weighted_records(k_ring, g_ring, count, K: gl.constexpr, LP: gl.constexpr, KDA: gl.constexpr,
                     L2NORM: gl.constexpr, SCAN: gl.constexpr, kl: gl.constexpr):  # fmt: skip
    """w_j ∘ k̂_j of records 0 … count-1 [LP, K], and the decay of the checkpoint [K], decayed to the last record."""
    k_raw = load_ring_k(k_ring, count, K, LP, kl).to(gl.float32)
    zero = gl.arange(0, K, gl.SliceLayout(0, kl)) * 0.0
    if KDA:
        g_next = load_next_g(g_ring, count, K, LP, kl)
        w, decay = channel_decays(g_ring, g_next, count, zero, K, LP, kl, SCAN)
        weighted = k_raw * w
    else:
        w, total = head_decays(g_ring, count, 0.0, LP, kl)
        decay = zero + total
        weighted = k_raw * w[:, None]
    if L2NORM:
        weighted = weighted * gl.rsqrt(gl.sum(k_raw * k_raw, 1) + L2_EPS)[:, None]
    return weighted, decay


@gluon.jit
def fold_fma(s, rows, d_rows, d_now, count, V: gl.constexpr, blk: gl.constexpr):
    """s + Σ_{j<count} d_j (w_j ∘ k̂_j)ᵀ + d_now k̂ᵀ in fp32 on a register tile.

    rows: shared [LP, 1, K] from `stash_records`; d_rows: pointers [BV] to record 0.
    """
    for j in range(count):
        d = gl.load(d_rows + j * V)
        s += d[:, None] * rows.index(j).load(blk)
    return s + d_now[:, None] * rows.index(count).load(blk)


@gluon.jit
def tf32_high(x):
    """The part of x that a tensor core keeps; x - tf32_high(x) is exact."""
    return (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def fold_mma(state_rows, tile, d_ring, decay_at, d_now, count, row0, K: gl.constexpr, V: gl.constexpr,
             LP: gl.constexpr, BV: gl.constexpr, NW: gl.constexpr):  # fmt: skip
    """The fold of `fold_fma` by tensor cores, reading the tile again in their layout, 32 columns at a time.

    Each fp32 operand is split in two tf32 halves and three of the four products are kept: the error is 2^-22.
    state_rows: pointer to row 0 of the head; decay_at: shared [1, K] decay of the checkpoint.
    """
    mma: gl.constexpr = mma_layout(NW)
    da: gl.constexpr = gl.DotOperandLayout(0, mma, 1)
    db: gl.constexpr = gl.DotOperandLayout(1, mma, 1)
    KT: gl.constexpr = 32
    row = row0 + gl.arange(0, BV, gl.SliceLayout(1, mma))
    col0 = gl.arange(0, KT, gl.SliceLayout(0, mma))
    a_row = row0 + gl.arange(0, BV, gl.SliceLayout(1, da))
    a_rec = gl.arange(0, LP, gl.SliceLayout(0, da))
    d = gl.load(d_ring + a_rec[None, :] * V + a_row[:, None], mask=(a_rec < count)[None, :], other=0.0)
    now = gl.convert_layout(d_now, gl.SliceLayout(1, da))
    d = gl.where((a_rec == count)[None, :], now[:, None], d)
    dh = tf32_high(d)
    dl = d - dh
    for kt in gl.static_range(K // KT):
        ptr = state_rows + row[:, None] * K + (kt * KT + col0)[None, :]
        acc = gl.load(ptr).to(gl.float32) * decay_at.slice(kt * KT, KT, dim=1).load(mma)
        k = tile.slice(kt * KT, KT, dim=1).load(db)
        kh = tf32_high(k)
        acc = mma_v2(dl, kh, acc, input_precision="tf32")
        acc = mma_v2(dh, k - kh, acc, input_precision="tf32")
        acc = mma_v2(dh, kh, acc, input_precision="tf32")
        gl.store(ptr, to_state(acc, state_rows.dtype.element_ty))
