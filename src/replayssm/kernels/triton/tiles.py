"""Loads and products of tiles. A state tile is [BK/BC, BV, BC]: column c·BC + i of row r at [c, r, i].

Splitting K this way leaves only BC contiguous columns to the lanes of a warp, the rest of a row to one thread, so a
readout needs few shuffles for a row. A vector over K is [BK/BC, BC]. EVEN: K = BK and BV divides V, no mask needed.

Memory is addressed in two dimensions, [BK/BC·BV, BC], and reshaped: of two long axes the compiler may give either to
the lanes, of one it cannot choose. VEC is the vector width of all tiles; a common one gives them a common layout.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton.numerics import L2_EPS, inv_norm, log_decay, rounded, row_sums, sigmoid


@triton.jit
def columns(BK: tl.constexpr, BC: tl.constexpr):
    """The column numbers [BK/BC, BC]."""
    return tl.arange(0, BK // BC)[:, None] * BC + tl.arange(0, BC)[None, :]


@triton.jit
def load_vector(ptr, cols, K: tl.constexpr, EVEN: tl.constexpr):
    """K contiguous elements as fp32 [BK/BC, BC]."""
    if EVEN:
        x = tl.load(ptr + cols)
    else:
        x = tl.load(ptr + cols, mask=cols < K, other=0.0)
    return x.to(tl.float32)


@triton.jit
def tile_rows(R: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr):
    """Row numbers 0 … R-1 of the memory form of a tile with R rows: [BK/BC·R, 1]."""
    return (tl.arange(0, BK // BC * R) % R)[:, None]


@triton.jit
def tile_columns(R: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr):
    """Column numbers of the memory form of a tile with R rows: [BK/BC·R, BC]."""
    i = tl.arange(0, BC)
    i = i // VEC * VEC + i % VEC  # the same number, contiguous only within VEC, which bounds the vector width
    return (tl.arange(0, BK // BC * R) // R * BC)[:, None] + i[None, :]


@triton.jit
def load_state(
    ptr, first, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """BV rows from `first` on of [V, K], in their own dtype."""
    r, c = first + tile_rows(BV, BK, BC), tile_columns(BV, BK, BC, VEC)
    if EVEN:
        s = tl.load(ptr + r * K + c)
    else:
        s = tl.load(ptr + r * K + c, mask=(r < V) & (c < K), other=0.0)
    return tl.reshape(s, [BK // BC, BV, BC])


@triton.jit
def store_state(
    ptr, s, first, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Round an fp32 tile into rows `first` … of [V, K]."""
    r, c = first + tile_rows(BV, BK, BC), tile_columns(BV, BK, BC, VEC)
    s = tl.reshape(rounded(s, ptr.dtype.element_ty), [BK // BC * BV, BC])
    if EVEN:
        tl.store(ptr + r * K + c, s)
    else:
        tl.store(ptr + r * K + c, s, mask=(r < V) & (c < K))


@triton.jit
def load_records(
    ptr, first, end, K: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr
):
    """Records `first` … `end`-1 of [L, K] as fp32 [BK/BC, BJ, BC]; zeros past `end`, whatever lies there."""
    j, c = first + tile_rows(BJ, BK, BC), tile_columns(BJ, BK, BC, VEC)
    x = tl.load(ptr + j * K + c, mask=(j < end) & (c < K), other=0.0)
    return tl.reshape(x, [BK // BC, BJ, BC]).to(tl.float32)


@triton.jit
def load_q_k(
    qkv_row, key_head, cols, scale, H: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr, EVEN: tl.constexpr
):
    """q̂ (scaled) and k̂ of a key head, and k as it came; fp32 [BK/BC, BC]."""
    q = load_vector(qkv_row + key_head * K, cols, K, EVEN)
    k_raw = load_vector(qkv_row + (H + key_head) * K, cols, K, EVEN)
    k = k_raw
    if L2NORM:
        q = q * inv_norm(q)
        k = k * inv_norm(k)
    return q * scale, k, k_raw


@triton.jit
def load_gate(
    a_ptr, a_chan, A_log_ptr, bias_ptr, bias_chan, cols, lower_bound,
    K: tl.constexpr, IS_KDA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Log decay of this step: GDN a scalar, KDA [BK/BC, BC] (0 past K). Parameters are widened before use."""
    rate = tl.load(A_log_ptr).to(tl.float32)
    if IS_KDA:
        mask = cols < K
        x = tl.load(a_ptr + cols.to(tl.int64) * a_chan, mask=mask, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + cols * bias_chan, mask=mask, other=0.0).to(tl.float32)
        g = tl.where(mask, log_decay(x, rate, lower_bound, BOUNDED), 0.0)
    else:
        x = tl.load(a_ptr).to(tl.float32) + tl.load(bias_ptr).to(tl.float32)
        g = log_decay(x, rate, lower_bound, BOUNDED)
    return g


@triton.jit
def load_beta(b_ptr, beta_scale):
    """beta_scale·sigmoid(b)."""
    return beta_scale * sigmoid(tl.load(b_ptr).to(tl.float32))


@triton.jit
def read_state(s, q, k, total, IS_KDA: tl.constexpr):
    """S₀(e^total ∘ x) for x = q̂, k̂; total the log decay of the checkpoint to now. Two vectors [BV]."""
    s = s.to(tl.float32)
    if IS_KDA:
        decay = tl.exp(total)
        read_q = row_sums(s * (q * decay)[:, None, :])
        read_k = row_sums(s * (k * decay)[:, None, :])
    else:
        decay = tl.exp(total)
        read_q = decay * row_sums(s * q[:, None, :])
        read_k = decay * row_sums(s * k[:, None, :])
    return read_q, read_k


@triton.jit
def decayed(s, total, IS_KDA: tl.constexpr):
    """The checkpoint tile decayed to now, fp32."""
    s = s.to(tl.float32)
    if IS_KDA:
        s = s * tl.exp(total)[:, None, :]
    else:
        s = s * tl.exp(total)
    return s


@triton.jit
def fold_records(
    acc, later, d_ptr, k_ptr, g_ptr, n, rows, cols,
    K: tl.constexpr, V: tl.constexpr, L2NORM: tl.constexpr, IS_KDA: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc + Σ_j d_j (e^{later_j} ∘ k̂_j)ᵀ over records n-1 … 0, and the log decay of all steps.

    `later` comes in as the log decay after the newest record and grows by g_j from record to record: a sum of
    numbers <= 0, never a difference. Plain fp32 products. Dead records are not loaded; they count as d = 0, g = 0.
    """
    for first in range(0, n, UNROLL):
        for u in tl.static_range(UNROLL):  # independent loads, so that their latencies overlap
            j = n - 1 - first - u
            in_k = cols < tl.where(j >= 0, K, 0)
            k = tl.load(k_ptr + j * K + cols, mask=in_k, other=0.0).to(tl.float32)
            d = tl.load(d_ptr + j * V + rows, mask=rows < tl.where(j >= 0, V, 0), other=0.0)
            if L2NORM:
                k = k * inv_norm(k)
            acc += d[None, :, None] * (k * tl.exp(later))[:, None, :]
            if IS_KDA:
                later += tl.load(g_ptr + j * K + cols, mask=in_k, other=0.0)
            else:
                later += tl.load(g_ptr + j, mask=j >= 0, other=0.0)
    return acc, later


@triton.jit
def read_records(
    q, k, g_now, d_ptr, k_ptr, g_ptr, n, rows, cols,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    VEC: tl.constexpr, L2NORM: tl.constexpr, IS_KDA: tl.constexpr,
):  # fmt: skip
    """Σ_j d_j·⟨e^{later_j} ∘ k̂_j, x⟩ for x = q̂, k̂, and the log decay of the checkpoint to now.

    BJ records at a time, newest first; an empty ring costs nothing. later_j sums the g of the steps after record j:
    a scan inside the chunk over g shifted by one, plus `carry`, the log decay after the chunk.
    """
    acc_q = tl.zeros([BJ, BV], tl.float32)
    acc_k = tl.zeros([BJ, BV], tl.float32)
    carry = g_now
    for done in range(0, n, BJ):
        base = (n - 1 - done) // BJ * BJ
        end = tl.minimum(n, base + BJ)
        kr = load_records(k_ptr, base, end, K, BJ, BK, BC, VEC)
        j = base + tl.arange(0, BJ)
        d = tl.load(d_ptr + j[:, None] * V + rows[None, :], mask=(j < n)[:, None] & (rows < V)[None, :], other=0.0)
        norm = tl.full([BJ], 1.0, tl.float32)
        if L2NORM:  # k is stored as it came, so its norm is taken here
            norm = tl.rsqrt(row_sums(kr * kr) + L2_EPS)
        after = carry
        if IS_KDA:
            g = load_records(g_ptr + K, base, end - 1, K, BJ, BK, BC, VEC)
            carry += tl.sum(g, 1) + tl.load(g_ptr + base * K + cols, mask=cols < K, other=0.0)
            weighted = kr * tl.exp(tl.cumsum(g, 1, reverse=True) + after[:, None, :])
            coef_q = norm * row_sums(weighted * q[:, None, :])
            coef_k = norm * row_sums(weighted * k[:, None, :])
        else:
            g = tl.load(g_ptr + 1 + j, mask=j < end - 1, other=0.0)
            carry += tl.sum(g, 0) + tl.load(g_ptr + base)
            w = norm * tl.exp(tl.cumsum(g, 0, reverse=True) + after)
            coef_q = w * row_sums(kr * q[:, None, :])
            coef_k = w * row_sums(kr * k[:, None, :])
        acc_q += coef_q[:, None] * d
        acc_k += coef_k[:, None] * d
    return tl.sum(acc_q, 0), tl.sum(acc_k, 0), carry
