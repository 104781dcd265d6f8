"""Gates, norms and stores shared by the kernels; all fp32. Formulas: docs/mathematics.md."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)  # inside the square root, as in the models that were trained with it
FP16_MAX = tl.constexpr(65504.0)
RATE_LOG_MAX = tl.constexpr(88.0)  # e^88 is finite, so that rate·softplus is never inf·0
LOG_DECAY_FLOOR = tl.constexpr(-200.0)  # e^-104 is 0 in fp32 already: the same decay, but a sum of it is a number


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) from e^-|x|, so nothing overflows."""
    u = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, u) / (1.0 + u)


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x| in [0, 1].

    log1p(u) = 2·atanh(z), z = u/(2 + u) <= 1/3, by its series: relative error 2e-8. The hardware logarithm has an
    absolute error of 2e-7 near 1, which is all of a small softplus.
    """
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    w = z * z
    p = 1 / 11 + w * (1 / 13)
    p = 1 / 9 + w * p
    p = 1 / 7 + w * p
    p = 1 / 5 + w * p
    p = 1 / 3 + w * p
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + w * p)


@triton.jit
def log_decay(x, A_log, lower_bound, BOUNDED: tl.constexpr):
    """g <= 0 of the pre-activation x = a + dt_bias (fp32, any shape); A_log a scalar."""
    rate = tl.exp(tl.where(A_log > RATE_LOG_MAX, RATE_LOG_MAX, A_log))
    if BOUNDED:
        g = lower_bound * sigmoid(rate * x)
    else:
        g = -rate * softplus(x)
    return tl.where(g < LOG_DECAY_FLOOR, LOG_DECAY_FLOOR, g)  # a select lets NaN through; a maximum would hide it


@triton.jit
def row_sums(x):
    """Sum over the columns of a tile [BK/BC, rows, BC]: over the first axis inside each thread, then few lanes."""
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def inv_norm(x):
    """rsqrt(Σx² + 1e-6) of a vector held as [BK/BC, BC]."""
    return tl.rsqrt(tl.sum(tl.sum(x * x, 0), 0) + L2_EPS)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 to the dtype of a state. fp16 saturates: a state past 65504 must not become inf; NaN stays NaN."""
    if dtype == tl.float16:
        x = tl.where(x > FP16_MAX, FP16_MAX, x)
        x = tl.where(x < -FP16_MAX, -FP16_MAX, x)
    return x.to(dtype)
