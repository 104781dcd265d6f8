"""The arithmetic against counts of real calls, against brute force, and at the edge of a budget."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import ops
from replayssm.errors import MemoryBudgetError, RingLengthError
from replayssm.planner.checkpoints import GEOMETRIES, Attention, Geometry
from replayssm.planner.estimate import (
    Budget,
    Settings,
    best_ring_len,
    best_ring_len_formula,
    best_ring_len_real,
    dominant_traffic,
    layer_bytes,
    layer_traffic,
    period_bytes,
    request_bytes,
    step_traffic,
)
from replayssm.spec import STATE_DTYPES, LayerSpec, replay_traffic
from tests.decode_case import Pool, int32, layer

DIMS = st.integers(1, 256)
IO = st.sampled_from(("float32", "bfloat16"))


@st.composite
def layer_specs(draw):
    h, group = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return LayerSpec(draw(st.sampled_from(("gdn", "kda"))), h, h * group, draw(DIMS), draw(DIMS))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("ring_len", [1, 4, 8])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_step_is_what_the_ops_count(kind, ring_len, state_dtype):
    """Three layers, two rows, two ring periods; each layer of the run is the one of the plan."""
    layers, rows, steps = 3, 2, 2 * ring_len
    lay = layer(kind, ring_len=ring_len, io=torch.bfloat16, state_dtype=getattr(torch, state_dtype))
    geometry = Geometry(lay.spec, layers, Attention(1, 2, 16))
    settings = Settings(ring_len, state_dtype)
    with ops.count_traffic() as counted:
        for seed in range(layers):
            Pool(lay, 3, 0.0).run(lay.tokens(steps, rows, seed), int32(2, 0))
    total = counted.totals()
    plan = step_traffic(geometry, settings, "replay", rows)
    assert (total.state_read + total.ring_read) / steps == plan.read
    assert (total.state_written + total.ring_written) / steps == pytest.approx(plan.written, rel=1e-12)
    moved = total.state_read + total.ring_read + total.state_written + total.ring_written
    assert moved == 2 * layers * rows * period_bytes(lay.spec, ring_len, state_dtype)
    with ops.count_traffic() as counted:
        for _ in range(layers):
            Pool(lay, 3, 0.0).packed_step(lay.tokens(1, rows)[0], int32(0, 1))
    total = counted.totals()
    assert (total.state_read, total.state_written) == step_traffic(geometry, settings, "packed", rows)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_request_holds_what_a_pool_allocates(kind):
    lay = layer(kind, ring_len=5, io=torch.bfloat16)
    one = layer_bytes(Geometry(lay.spec, 1, Attention(0)), Settings(5))
    state, *ring = (tensor[0] for tensor in Pool(lay, 2, 0.0).tensors)
    assert (one.state, one.ring) == (state.nbytes, sum(t.nbytes for t in ring))
    assert one.conv == lay.spec.conv_array(1).nbytes
    assert one.kv == 0


@given(layer_specs(), st.integers(1, 64), st.sampled_from(STATE_DTYPES), IO)
def test_a_period_is_the_traffic_model_times_its_length(spec, ring_len, state_dtype, io_dtype):
    mean = replay_traffic(spec, ring_len, state_dtype, io_dtype).total
    assert period_bytes(spec, ring_len, state_dtype, io_dtype) == pytest.approx(ring_len * mean, rel=1e-12)


@given(layer_specs(), st.sampled_from(STATE_DTYPES), IO)
def test_the_formula_finds_what_trying_all_finds(spec, state_dtype, io_dtype):
    best = best_ring_len(spec, state_dtype, io_dtype)
    assert best == best_ring_len_formula(spec, state_dtype, io_dtype)
    means = [Fraction(period_bytes(spec, n, state_dtype, io_dtype), n) for n in range(1, 65)]
    assert min(means) == means[best - 1]
    assert all(mean > means[best - 1] for mean in means[: best - 1])
    real = best_ring_len_real(spec, state_dtype, io_dtype)
    if 1 < real < 64:  # rounding: the nearest whole L, or one more just below the half
        assert best - 0.5 - 1 / 8 / max(1, best - 1) <= real <= best + 0.5
        assert abs(best - real) < 1


@pytest.mark.parametrize(("name", "best", "share"), [("Qwen3.5-9B", 14, 0.572), ("Kimi-Linear-48B-A3B", 10, 0.603)])
def test_the_best_lengths_of_the_docs(name, best, share):
    geometry, settings = GEOMETRIES[name], Settings()
    assert best_ring_len(geometry.spec) == best
    packed = step_traffic(geometry, settings, "packed").total
    assert step_traffic(geometry, settings, "replay", ring_len=best).total / packed == pytest.approx(share, abs=5e-4)


def test_the_simplest_case():
    assert dominant_traffic(128, 64) == (2 * 4 * 128 * 64, 4 * 128 * 64)
    assert dominant_traffic(128, 64, "bfloat16") == (2 * 2 * 128 * 64, 2 * 128 * 64)
    settings = Settings()
    spec = LayerSpec("gdn", 16, 32, 128, 128)
    assert layer_traffic(spec, settings, "packed").total == 32 * dominant_traffic(128, 128).packed


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_the_full_model_tends_to_the_simplest_case(kind):
    """What it has beyond 4·V·K falls like 1/√K at the best L, and is folds and vectors alone at any L."""
    beyond = []
    for dim in (4, 16, 64, 256):
        spec = LayerSpec(kind, 2, 4, dim, dim)
        simple = 4 * dominant_traffic(dim, dim).replay
        for ring_len in (1, 8, 64):
            full = replay_traffic(spec, ring_len).total
            records = ((ring_len - 1) / 2 + (ring_len - 1) / ring_len) * spec.record_bytes()
            assert full - simple / ring_len - records == pytest.approx(simple, rel=1e-12)
        beyond.append(replay_traffic(spec, best_ring_len(spec)).total / simple - 1)
    ratios = [beyond[2] / beyond[1], beyond[3] / beyond[2]]
    assert ratios == pytest.approx([0.5, 0.5], abs=0.08)
    assert beyond == sorted(beyond, reverse=True)


def test_modes_differ_in_the_ring():
    geometry, settings = GEOMETRIES["Qwen3.5-9B"], Settings(ring_len=4)
    packed, replay = (request_bytes(geometry, settings, mode) for mode in ("packed", "replay"))
    assert packed == replay._replace(ring=0)
    assert replay.ring == 24 * 4 * geometry.spec.record_bytes()
    assert replay.conv == 24 * geometry.spec.conv_array(1).nbytes
    assert replay.state == geometry.state_bytes
    assert replay.drafts == 0
    with pytest.raises(RingLengthError):
        layer_bytes(geometry, replace(settings, ring_len=65))


@given(
    st.sampled_from(sorted(GEOMETRIES)),
    st.integers(1, 64),
    st.integers(0, 2**40),
    st.integers(0, 2**38),
    st.integers(0, 2**35),
    st.integers(0, 100_000),
    st.sampled_from(("packed", "replay")),
)
def test_capacity_is_exact(name, ring_len, memory, weights, reserve, context, mode):
    """n requests fit, n + 1 do not; the ring of each is in the budget."""
    settings = Settings(ring_len=ring_len, context=context)
    held = request_bytes(GEOMETRIES[name], settings, mode)
    budget = Budget(memory, weights, reserve)
    if weights + reserve > memory:
        with pytest.raises(MemoryBudgetError):
            budget.requests(held.total)
        return
    fit = budget.requests(held.total)
    assert weights + reserve + fit * held.total <= memory < weights + reserve + (fit + 1) * held.total
    one = layer_bytes(GEOMETRIES[name], settings)
    ring = GEOMETRIES[name].linear_layers * one.ring
    assert held.total == held.state + held.conv + held.kv + (ring if mode == "replay" else 0)


def test_a_memory_too_small_is_refused_with_all_numbers():
    with pytest.raises(MemoryBudgetError, match=r"memory of 1 GiB does not hold weights of 2 GiB and 0.5 GiB kept"):
        Budget(2**30, 2**31, 2**29).requests(1)
    assert Budget(2**30, 2**30).requests(1) == 0
