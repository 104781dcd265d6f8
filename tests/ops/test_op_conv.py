"""The causal convolution of one token a row."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops, reference
from tests import tolerance
from tests.decode_case import NAN, int32


def make(slots=5, channels=33, size=3, width=4, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    state = torch.randn(slots, channels, size, generator=gen).to(dtype)
    return state, torch.randn(channels, width, generator=gen).to(dtype), torch.randn(channels, generator=gen).to(dtype)


def limit(width, dtype=torch.float32):
    return tolerance.output(width, 0, dtype)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("slots", [int32(0, 1, 2), int32(4, 1, 2), int32(3, -1, 0)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_against_reference_for_many_steps(width, extra, activation, slots, channels_last):
    """Windows wider than the history keep all their columns moving; the output uses the newest W-1."""
    state, weight, bias = make(size=width - 1 + extra, width=width)
    if channels_last:
        state = state.mT.contiguous().mT
    want_state = state.double()
    for t in range(7):
        x = torch.randn(3, 33, generator=torch.Generator().manual_seed(t))
        y = ops.causal_conv_update(x, state, weight, bias if extra else None, slots, activation)
        want, want_state = reference.causal_conv_update(
            x, want_state, weight, bias if extra else None, slots, activation
        )
        tolerance.assert_close(y, want, limit(width), "y")
        assert torch.equal(state.double(), want_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_16_bit(dtype, state_dtype):
    state, weight, bias = make(dtype=dtype)
    state = state.to(state_dtype or dtype)
    x = torch.randn(2, 33).to(dtype)
    want, want_state = reference.causal_conv_update(x, state, weight, bias, int32(1, 3))
    y = ops.causal_conv_update(x, state, weight, bias, int32(1, 3))
    assert y.dtype == dtype
    tolerance.assert_close(y, want, limit(4, dtype), "y")
    assert torch.equal(state, want_state)


def test_equals_a_convolution_over_the_whole_sequence():
    _, weight, _ = make()
    state, x = torch.zeros(1, 33, 4), torch.randn(9, 33)
    y = torch.stack([ops.causal_conv_update(x[t : t + 1], state, weight, None, int32(0), None)[0] for t in range(9)])
    padded = torch.nn.functional.pad(x.T[None].double(), (3, 0))
    want = torch.nn.functional.conv1d(padded, weight[:, None].double(), groups=33)[0].T
    tolerance.assert_close(y, want, limit(4), "sequence")


@pytest.mark.parametrize("channels", [33, 2064])
@pytest.mark.parametrize("width", [3, 4])
def test_padding_gives_zeros_and_touches_nothing(channels, width):
    state, weight, bias = make(8, channels, 3, width)
    before, x = state.clone(), torch.randn(8, channels)
    slots = int32(-1, 5, 2, -1, 7, -1, -1, -1)
    x[slots < 0] = NAN
    out = torch.full((8, channels), NAN)
    assert ops.causal_conv_update(x, state, weight, bias, slots, out=out) is out
    assert torch.equal(out[slots < 0], torch.zeros(5, channels))
    assert bool(out.isfinite().all())
    others = [0, 1, 3, 4, 6]
    assert torch.equal(state[others], before[others])
    out = ops.causal_conv_update(x, state, weight, bias, torch.full((8,), -1, dtype=torch.int32))
    assert torch.equal(out, torch.zeros(8, channels))


def test_poison_in_old_columns_other_slots_and_around_a_strided_input():
    state, weight, bias = make(size=6)
    state[:, :, :3] = NAN
    state[[0, 2, 4]] = NAN
    wide = torch.full((4, 70), NAN)
    x = wide[1:3, 2:68:2]
    x.copy_(torch.randn(2, 33))
    want, _ = reference.causal_conv_update(x, state[:, :, 3:], weight, bias, int32(3, 1))
    storage = torch.full((5, 2, 33, 6), NAN)
    storage[:, 1] = state
    y = ops.causal_conv_update(x, storage[:, 1], weight, bias, int32(3, 1))
    tolerance.assert_close(y, want, limit(4), "y")
    assert torch.equal(storage[[3, 1], 1, :, -1], x), "the window itself must have moved"
    assert bool(storage[:, 0].isnan().all())


@pytest.mark.parametrize("slots", [int32(1, 2, 3), int32(4, 0, 2), int32(-1, 3, 1)])
def test_output_may_be_the_input(slots):
    state, weight, bias = make()
    again, x = state.clone(), torch.randn(3, 33)
    want = ops.causal_conv_update(x.clone(), again, weight, bias, slots)
    assert torch.equal(ops.causal_conv_update(x, state, weight, bias, slots, out=x), want)
    assert torch.equal(state, again)


def test_empty_batch():
    state, weight, bias = make()
    assert ops.causal_conv_update(torch.empty(0, 33), state, weight, bias, int32()).shape == (0, 33)
