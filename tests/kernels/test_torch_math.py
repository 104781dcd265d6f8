"""Gates and decay weights of the torch backend against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import reference
from replayssm.kernels import torch_math, torch_rows
from tests import tolerance
from tests.decode_case import int32

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("A_log", [-20.0, -10.0, 0.0, 5.0])
def test_decay_is_within_1e_6_of_fp64(A_log):
    x = torch.tensor([-100.0, -20.0, 0.0, 19.9, 20.1, 88.0, 89.0, 1e4, math.inf, -math.inf])
    rate, bias = torch.full((10,), A_log), torch.zeros(10)
    got = torch_math.log_decay(x[None], rate, bias, False, None).exp()
    want = reference.gdn_log_decay(x[None], rate, bias).exp()
    assert (got - want).abs().max() <= 1e-6
    assert float(got[0, -2]) == 0.0
    assert float(got[0, -1]) == 1.0


def test_parameters_in_16_bit_are_widened_first():
    a, rate, bias = torch.randn(3, 4).bfloat16(), torch.tensor([2.77, 1.3, -4.1, 0.2]).bfloat16(), torch.randn(4).half()
    got = torch_math.log_decay(a, rate, bias, False, None)
    assert torch.equal(got, torch_math.log_decay(a.float(), rate.float(), bias.float(), False, None))


def suffix_weights(g, g_now):
    """[heads, n + 1, ·] in fp64 by one sum for each entry."""
    steps = torch.cat([g.double(), g_now.double().unsqueeze(1)], 1)
    return torch.stack([steps[:, j:].sum(1).exp() for j in range(steps.shape[1])], 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 63), st.sampled_from([None, 5]), st.floats(-6, 5), st.integers(0, 10**6), st.booleans())
def test_decay_weights(n, channels, strength, seed, infinite):
    gen = torch.Generator().manual_seed(seed)
    shape = (3, n) if channels is None else (3, n, channels)
    g = -torch.rand(shape, generator=gen) * math.exp(strength)
    g_now = -torch.rand(3, *shape[2:], generator=gen)
    if infinite:
        g[:, n // 2] = -math.inf
    got = torch_math.decay_weights(g.clamp_min(torch_math.LOG_DECAY_FLOOR), g_now)
    want = suffix_weights(g, g_now).view(got.shape)
    # Σ of n + 1 terms of one sign, then exp: the absolute error of the exponent is the relative one of the weight.
    assert bool(((got - want).abs() <= EPS * (n + 4) * (1 + want.log().abs().clamp_max(200)) * want + 1e-37).all())
    without = torch_math.decay_weights(g.clamp_min(torch_math.LOG_DECAY_FLOOR), None)
    tolerance.assert_close(without, suffix_weights(g, torch.zeros_like(g_now)).view(got.shape), EPS * 4 * (n + 20))


def test_after_strong_decay_the_newest_weights_keep_all_their_digits():
    """The exponents reach -1920 within the ring; a cumulative sum in fp32 would leave the newest with 1e-4."""
    g = torch.full((1, 64), -30.0)
    g[0, -1] = -1e-3
    got = torch_math.decay_weights(g, torch.tensor([-1e-3]))[0, -2:, 0].double()
    assert got.tolist() == pytest.approx([math.exp(-2e-3), math.exp(-1e-3)], rel=2 * EPS)


def test_zero_and_tiny_rows_have_finite_norms():
    x = torch.tensor([[0.0, 0.0], [1e-20, 0.0], [300.0, 400.0]])
    assert torch.isfinite(torch_math.l2norm(x)).all()
    assert torch_math.l2norm(x)[2].tolist() == pytest.approx([0.6, 0.8])


@given(st.lists(st.integers(0, 8), unique=True, min_size=1, max_size=9))
def test_gather_views_consecutive_slots_and_copies_others(slots):
    pool = torch.arange(9.0)
    got = torch_rows.live_rows(int32(*slots)).gather(pool)
    assert got.tolist() == [float(s) for s in slots]
    consecutive = slots == list(range(slots[0], slots[0] + len(slots)))
    assert (got.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()) == consecutive


def test_live_rows():
    rows = torch_rows.live_rows(int32(-1, 5, -7, 0))
    assert rows.slots.tolist() == [5, 0]
    assert rows.first is None
    assert rows.take(torch.arange(4)).tolist() == [1, 3]
    out = torch.zeros(4)
    rows.put(out, torch.tensor([7.0, 8.0]))
    assert out.tolist() == [0, 7, 0, 8]
    assert torch_rows.live_rows(int32(2, 1)).where is None
    assert torch_rows.live_rows(int32(4, 5, 6)).first == 4
    assert torch_rows.live_rows(int32(-1)).length == 0


def test_some_of_the_live_rows():
    some = torch_rows.live_rows(int32(-1, 3, 9, 4)).some(torch.tensor([0, 2]))
    assert some.slots.tolist() == [3, 4]
    assert some.first == 3
    assert some.take(torch.tensor([10, 20, 30])).tolist() == [10, 30]
