"""The tolerances of all numeric tests, derived once. Errors are relative to the largest value of the oracle.

Rounding errors of an fp32 sum of n products walk at random, so the sum is off by about sqrt(n)·eps of its size; twice
that covers the largest of many entries. A readout sums K products and then L records, behind a handful of roundings in
gates and norms. A state takes one such error a step, but old errors decay and d feeds back (the delta rule corrects
what it reads), so the factor stays a small constant instead of the number of steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GATE_ROUNDINGS = 8  # exp, softplus, sigmoid, rsqrt and their products, in units of eps
STATE_FACTOR = 2  # old error plus new error


def arithmetic(head_k_dim: int, ring_len: int) -> float:
    """What fp32 arithmetic alone may cost a readout."""
    return eps(torch.float32) * (2 * math.sqrt(head_k_dim + ring_len) + GATE_ROUNDINGS)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def output(head_k_dim: int, ring_len: int, out_dtype: torch.dtype = torch.float32) -> float:
    """Exact fp32 arithmetic, then one rounding to the output dtype."""
    return arithmetic(head_k_dim, ring_len) + rounding(out_dtype)


def state(head_k_dim: int, ring_len: int, state_dtype: torch.dtype = torch.float32, stores: int = 1) -> float:
    """As the output, and one rounding to the state dtype for every store that is still remembered."""
    return STATE_FACTOR * arithmetic(head_k_dim, ring_len) + stores * rounding(state_dtype)


def rounding(dtype: torch.dtype) -> float:
    """Half an ulp; fp32 rounding is part of the arithmetic error already."""
    return 0.0 if dtype == torch.float32 else eps(dtype) / 2


def relative_error(got: Tensor, want: Tensor) -> float:
    """max|got - want| / max|want|; infinite when `got` is not finite."""
    if not got.numel():
        return 0.0
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))


def assert_close(got: Tensor, want: Tensor, limit: float, what: str = "") -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} != {tuple(want.shape)}"
    error = relative_error(got, want)
    assert error <= limit, f"{what}: relative error {error:.2e} > {limit:.2e}"
