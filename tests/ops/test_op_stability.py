"""Extreme gates and long runs."""

from __future__ import annotations

import math

import pytest
import torch

from replayssm import ops
from tests import tolerance
from tests.decode_case import KINDS, Pool, int32, layer

INF = float("inf")
SLOTS = int32(2, 0, 1)


def run_both(lay, tokens, force=None):
    pool, state = Pool(lay, 3), lay.state(3)
    pool.place(SLOTS, state)
    out = pool.run(tokens, SLOTS, force)
    want, want_state = lay.serial(state, tokens)
    k = lay.spec.head_k_dim
    tolerance.assert_close(out, want, tolerance.output(k, lay.ring_len), "output")
    tolerance.assert_close(pool.flushed(SLOTS), want_state, tolerance.state(k, lay.ring_len), "state")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("log_decay", [-30.0, math.log(1e-12), -0.5, -1e-6])
def test_uniform_decay(kind, log_decay):
    """64 tokens at -30 a step, ring of 16: a cumulative sum would reach -480 within one ring period."""
    lay = layer(kind, ring_len=16)
    lay.A_log = torch.full((6,), math.log(-log_decay))
    lay.dt_bias.zero_()
    tokens = lay.tokens(64, 3)
    tokens.a.fill_(math.log(math.expm1(1.0)))  # softplus gives 1
    run_both(lay, tokens)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("at", [0, 3, 7, 8])
def test_one_step_that_forgets_everything(kind, at):
    """Log decay -inf on one step, alone, twice in a ring, and for part of the channels."""
    lay = layer(kind, ring_len=8)
    tokens = lay.tokens(20, 3)
    tokens.a[at] = INF
    tokens.a[at + 2, 1] = INF
    tokens.a[at + 4, :, 0] = INF
    run_both(lay, tokens)


def test_bounded_gate_that_saturates():
    lay = layer("kda-bounded", ring_len=32)
    tokens = lay.tokens(70, 3)
    tokens.a[::2] = 1e4
    tokens.a[1::4] = -1e4
    run_both(lay, tokens)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("pre_softplus", [-INF, -100.0, -20.0, 0.0, 19.9, 20.1, 88.0, 89.0, 1e4, INF])
def test_softplus_inputs(kind, pre_softplus):
    lay = layer(kind, ring_len=4)
    lay.A_log = torch.tensor([-20.0, -10.0, 0.0, 5.0, -10.0, -3.0])
    lay.dt_bias.zero_()
    tokens = lay.tokens(9, 3)
    tokens.a.fill_(pre_softplus)
    run_both(lay, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_state_error_does_not_grow_over_4096_steps(kind):
    """Random forced flushes on top of the full ones; the error at 4096 steps is bounded as at 256."""
    lay, steps = layer(kind, (1, 2, 16, 8), ring_len=16), 4096
    gen = torch.Generator().manual_seed(11)
    pool, state, tokens = Pool(lay, 2), lay.state(2), lay.tokens(steps, 2)
    lay.A_log.fill_(-4.0)  # decay near 1: the state remembers hundreds of steps
    slots, force = int32(1, 0), (torch.rand(steps, 2, generator=gen) < 0.05).int()
    pool.place(slots, state)
    start = 0
    for stop in (256, 1024, 4096):
        part = type(tokens)(*(x[start:stop] for x in tokens[:]))
        pool.run(part, slots, force[start:stop])
        state = lay.serial(state, part)[1]
        copy = torch.zeros_like(pool.initial_state)
        ops.materialize(*pool.tensors, slots, ops.gather_cursors(pool.cursor, slots), copy, slots)
        error = tolerance.relative_error(copy[slots.long()], state)
        assert error <= 2e-5, f"after {stop} steps: {error:.1e}"
        start = stop


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_state_drifts_less_than_under_packed_decode(kind, state_dtype):
    """Replay rounds the state once per ring period, packed decode on every step."""
    lay, steps = layer(kind, (2, 4, 32, 16), ring_len=16, state_dtype=state_dtype), 400
    lay.A_log.fill_(-4.0)
    replay, packed, state, tokens = Pool(lay, 3), Pool(lay, 3), lay.state(3), lay.tokens(steps, 3)
    for pool in (replay, packed):
        pool.place(SLOTS, state)
    replay.run(tokens, SLOTS)
    for t in range(steps):
        packed.packed_step(tokens[t], SLOTS)
    want = lay.serial(state, tokens)[1]
    drift = [tolerance.relative_error(p, want) for p in (replay.flushed(SLOTS), packed.initial_state[SLOTS.long()])]
    assert drift[0] < 0.7 * drift[1], drift


def test_slow_decay_is_not_lost_in_a_bf16_state():
    """Decay 0.999 a step is below half an ulp of bf16: stored every step the state stays at 1 for ever."""
    lay = layer("gdn", (1, 1, 1, 1), ring_len=16, state_dtype=torch.bfloat16)
    lay.A_log, lay.dt_bias = torch.tensor([math.log(1e-3)]), torch.zeros(1)
    tokens = lay.tokens(1008, 1)
    tokens.mixed_qkv.zero_()
    tokens.a.fill_(math.log(math.expm1(1.0)))
    replay, packed = Pool(lay, 1), Pool(lay, 1)
    for pool in (replay, packed):
        pool.place(int32(0), torch.ones(1, 1, 1, 1))
    replay.run(tokens, int32(0))
    for t in range(1008):
        packed.packed_step(tokens[t], int32(0))
    assert float(packed.initial_state) == 1.0
    assert float(replay.initial_state) == pytest.approx(math.exp(-1.008), rel=0.05)


@pytest.mark.parametrize("replay", [True, False])
def test_fp16_state_saturates_instead_of_overflowing(replay):
    """No decay and +100 a step on one entry, past 65504."""
    lay = layer("gdn", (1, 1, 2, 1), ring_len=16, state_dtype=torch.float16, l2norm=False)
    lay.A_log.fill_(-INF)
    lay.spec = type(lay.spec)("gdn", 1, 1, 2, 1, beta_scale=1.0)
    tokens = lay.tokens(1, 1)
    tokens.mixed_qkv.copy_(torch.tensor([0.0, 0.0, 1e-3, 0.0, 1e8]))  # k small, so that d stays near v
    tokens.b.fill_(100.0)
    pool = Pool(lay, 1)
    pool.place(int32(0), torch.zeros(1, 1, 1, 2))
    for _ in range(32):
        pool.step(tokens[0], int32(0)) if replay else pool.packed_step(tokens[0], int32(0))
    assert pool.flushed(int32(0)).flatten().tolist() == [65504.0, 0.0]
