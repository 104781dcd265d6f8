# mypy: ignore-errors

"""Layouts and parts of the kernel that verifies windows: products of T tokens with a state, with records, with others.

The product with the state, [CH, K] times [K, 2T], is the one in this package that runs on tensor cores, and it is made
of exact pieces. tf32 and bf16 round an operand; so every number is split into a sum of such numbers first, and the
pieces are multiplied with each other, but for pairs that are below the last digit of fp32:

    fp32 state    x = hi + lo in tf32, 22 bits: hi·hi + hi·lo + lo·hi
    fp16 state    is a tf32 number already: s·hi + s·lo
    bf16 state    x in three bf16, 24 bits: s·x₁ + s·x₂ + s·x₃

What one instruction adds up is cut off and not rounded, so columns are summed 128 bytes of the state at a time, and
those sums by plain additions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import as_rows, as_vectors, row_major

# Newer Triton has it under another name.
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def token_layout(k_dim, warps):
    """[T, K] tile of q, k or gates: a token in one warp, so that its sums over K stay there."""
    return gl.BlockedLayout([1, k_dim // 32], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def dots_layout(records, warps):
    """[T, L, K] products of tokens and records: tokens over warps, sums over 8 lanes."""
    return gl.BlockedLayout([1, records // 4, 4], [1, 4, 8], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def row_layout(records, warps):
    """[V, L] tile of d: a row of V in one thread, with all its records."""
    return gl.BlockedLayout([1, records], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def keys_layout(width, warps):
    """Raw keys of all heads of a token, 8 bytes or more a thread where there are that many."""
    return gl.BlockedLayout([max(1, min(8, width // (32 * warps)))], [32], [warps], [0])


@gluon.constexpr_function
def product_layout(warps):
    """[CH, 2T] product: warps along V, since the other side is one instruction wide."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def vectors_layout(tensor):
    """Shared memory [2T, K] of vectors. Tensor cores take 16 bytes of 8 rows at once, so it is swizzled for them."""
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0]) if tensor else row_major()


@gluon.constexpr_function
def operand_layout(index, warps, elem_bytes):
    """An operand of `product_layout`, in the registers that the instruction wants."""
    return gl.DotOperandLayout(index, product_layout(warps), 2 if elem_bytes == 2 else 1)


@gluon.jit
def tf32(x):
    """The nearest tf32 number, ties away from zero."""
    return gl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def product(tile, x, dtype: gl.constexpr, CH: gl.constexpr, K: gl.constexpr, N: gl.constexpr, NW: gl.constexpr):
    """S xᵀ [CH, N] of a shared tile [CH, K] of the state and shared fp32 vectors x [N, K]."""
    ELEM: gl.constexpr = dtype.primitive_bitwidth // 8
    COLS: gl.constexpr = min(K, 128 // ELEM)
    BF16: gl.constexpr = dtype == gl.bfloat16
    left: gl.constexpr = operand_layout(0, NW, 2 if BF16 else 4)
    right: gl.constexpr = operand_layout(1, NW, 2 if BF16 else 4)
    total = gl.full([CH, N], 0.0, gl.float32, product_layout(NW))
    zero = gl.full([CH, N], 0.0, gl.float32, product_layout(NW))
    for i in gl.static_range(K // COLS):
        s = tile.slice(i * COLS, COLS, dim=1).load(left)
        y = x.slice(i * COLS, COLS, dim=1).permute([1, 0]).load(right)
        if BF16:
            first = y.to(gl.bfloat16)
            y = y - first.to(gl.float32)
            second = y.to(gl.bfloat16)
            third = (y - second.to(gl.float32)).to(gl.bfloat16)
            part = mma_v2(s, third, zero)
            part = mma_v2(s, second, part)
            part = mma_v2(s, first, part)
        else:
            s = s.to(gl.float32)
            high = tf32(y)
            low = tf32(y - high)
            if dtype == gl.float16:
                part = mma_v2(s, low, zero, input_precision="tf32")
                part = mma_v2(s, high, part, input_precision="tf32")
            else:
                s_high = tf32(s)
                part = mma_v2(tf32(s - s_high), high, zero, input_precision="tf32")
                part = mma_v2(s_high, low, part, input_precision="tf32")
                part = mma_v2(s_high, high, part, input_precision="tf32")
        total += part
    return total


@gluon.jit
def product_fma(tile, xs, ys, at, CH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr,
                TP: gl.constexpr, blk: gl.constexpr):  # fmt: skip
    """The same by plain multiply-adds, into ys [2·TP, V] from column `at` on; tokens that only pad are left out."""
    s = tile.load(blk).to(gl.float32)
    vectors, sums = as_rows(xs, 2 * TP, K), as_vectors(ys, 2 * TP, V)
    for i in gl.static_range(2 * T):
        row = i if i < T else TP + i - T
        sums.index(row).slice(at, CH).store(gl.sum(s * vectors.index(row).load(blk), 1))


@gluon.jit
def effects(
    pairs, lowers, q, k, g, beta, TP: gl.constexpr, T: gl.constexpr, K: gl.constexpr, xl: gl.constexpr
):  # fmt: skip
    """What token j does to token i, for all pairs: lowers [2·TP, TP] gets ⟨e^{γ_i-γ_j} ∘ k̂_j, q̂_i⟩ at [j, i] and β_i
    times the same with k̂_i at [TP + j, i]. Only i >= j and i > j mean something.

    The gates between j and i are added up, later ones first, and not subtracted from each other. pairs [2·TP, K] hands
    gates and keys of a token to the others.
    """
    pairs.slice(0, TP).store(g)
    pairs.slice(TP, TP).store(k)
    rows = as_rows(pairs, 2 * TP, K)
    token = gl.arange(0, TP, gl.SliceLayout(1, xl))
    tail = gl.full([TP, K], 0.0, gl.float32, xl)
    for back in gl.static_range(T):
        j = T - 1 - back
        if back > 0:
            tail += gl.where((token > j)[:, None], rows.index(j + 1).load(xl), 0.0)
        w = blocks.exp(tail) * rows.index(TP + j).load(xl)
        lowers.index(j).store(gl.sum(w * q, 1))
        lowers.index(TP + j).store(beta * gl.sum(w * k, 1))
