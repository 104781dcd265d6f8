"""Gates of the oracle against Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from replayssm import reference

INPUTS = [-100.0, -20.0, 0.0, 19.9, 20.1, 88.0, 89.0, 1e4]


def softplus(x):
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


@pytest.mark.parametrize("x", INPUTS)
@pytest.mark.parametrize("A_log", [-20.0, -10.0, 0.0, 5.0])
def test_decay(x, A_log):
    want = -math.exp(A_log) * softplus(x)
    a, rate = torch.tensor([x - 0.5], dtype=torch.float64), torch.tensor([A_log])
    assert float(reference.gdn_log_decay(a, rate, torch.tensor([0.5]))) == pytest.approx(want, rel=1e-12)
    got = reference.kda_log_decay(a[:, None], rate, torch.tensor([[0.5]]))
    assert float(got) == pytest.approx(want, rel=1e-12)


def test_a_long_softplus_tail_does_not_overflow_into_a_decay_of_zero():
    g = reference.gdn_log_decay(torch.tensor([89.0]), torch.tensor([-10.0]), torch.zeros(1))
    assert float(torch.exp(g)) == pytest.approx(0.99597, abs=1e-5)


@pytest.mark.parametrize("x", [-3.0, 0.0, 2.0])
def test_bounded_decay(x):
    a, rate = torch.tensor([[x]]), torch.tensor([0.3])
    got = reference.kda_log_decay(a, rate, torch.zeros(1, 1), lower_bound=-5.0)
    assert float(got) == pytest.approx(-5 / (1 + math.exp(-math.exp(float(rate)) * x)), rel=1e-12)


def test_infinite_inputs_give_decays_of_zero_and_one():
    for x, decay in ((math.inf, 0.0), (-math.inf, 1.0)):
        g = reference.gdn_log_decay(torch.tensor([x]), torch.zeros(1), torch.zeros(1))
        assert float(torch.exp(g)) == decay


def test_beta_and_norm():
    assert float(reference.beta(torch.tensor(0.0), 2.0)) == 1.0
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert reference.l2norm(x).tolist() == pytest.approx([3 / math.sqrt(25 + 1e-6), 4 / math.sqrt(25 + 1e-6)])
    assert reference.l2norm(torch.zeros(4)).tolist() == [0.0] * 4
    assert reference.l2norm(x * 1e6).norm() == pytest.approx(1)
