"""Why the ring keeps raw k: rounding the normalised k to bf16 costs digits that a raw bf16 k does not."""

from __future__ import annotations

import torch

from replayssm.reference.gates import l2norm


def fold_error(k_used: torch.Tensor, k_true: torch.Tensor, d: torch.Tensor) -> float:
    """Relative error of Σ_j d_j k̂_jᵀ, in float64."""
    want = d.mT @ k_true
    return float((d.mT @ k_used - want).norm() / want.norm())


def test_rounded_normalised_k_loses_digits_and_raw_k_does_not():
    gen = torch.Generator().manual_seed(0)
    raw = torch.randn(16, 128, generator=gen).bfloat16()  # as the convolution leaves it
    d = torch.randn(16, 128, generator=gen, dtype=torch.float64)
    true = l2norm(raw.double())
    rounded = l2norm(raw.float()).bfloat16().double()
    read_back = l2norm(raw.float()).double()
    assert fold_error(rounded, true, d) > 5e-4
    assert fold_error(read_back, true, d) < 2e-7
