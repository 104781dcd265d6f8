"""On a GPU: a whole decode step as a CUDA graph, without waiting for the host, over several ring periods."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from tests import tolerance
from tests.ops.gpu_case import BF16, DEVICE, FP32, GPU, Chain, captured, no_host_sync
from tests.step_case import same

pytestmark = GPU
GLUON, PORTABLE = (2, 4, 64, 32), (1, 3, 80, 48)
DIMS = pytest.mark.parametrize("dims", [GLUON, PORTABLE])
# First-order factors of errors of q, k (twice: k̂·q̂ and d) and v, which come out of the convolution.
CONV_FACTOR = 4


@DIMS
def test_graph_eager_cpu_and_oracle_agree(dims):
    """Flushes of full rings and forced ones, a row that pads for a while, a slot that joins: one graph for all."""
    ours, cpu = Chain(DEVICE, dims), Chain("cpu", dims)
    eager, eager_cursors = ours.run(ours.step)
    eager_states = ours.states()
    graph, cursors = ours.run(captured(ours.step))
    states = ours.states()
    assert same(graph, eager)
    assert same(states, eager_states)
    theirs, cpu_cursors = cpu.run(cpu.step)
    assert torch.equal(cursors, cpu_cursors)
    assert torch.equal(eager_cursors, cpu_cursors)
    assert not graph[Chain.LEAVES : Chain.JOINS, :, 1].any(), "row 1 was padding"
    want, want_states = ours.truth()
    inputs = CONV_FACTOR * tolerance.output(4, 0)
    for i, kind in enumerate(Chain.KINDS):
        limit = tolerance.output(dims[2], Chain.RING) + inputs
        tolerance.assert_close(graph[:, i], want[:, i], limit, f"{kind} output against the oracle")
        tolerance.assert_close(graph[:, i], theirs[:, i], 2 * limit, f"{kind} output against the CPU")
        limit = tolerance.state(dims[2], Chain.RING) + inputs
        tolerance.assert_close(states[i], want_states[i], limit, f"{kind} state against the oracle")
        tolerance.assert_close(states[i], cpu.states()[i], 2 * limit, f"{kind} state against the CPU")


@DIMS
@pytest.mark.parametrize("io", [FP32, BF16])
def test_a_step_never_waits_for_the_host(dims, io):
    """Also with the traffic counter on, and for the operations that a step does not contain."""
    chain = Chain(DEVICE, dims, io)
    part = chain.parts[1]
    pool, copy = part.pool, torch.zeros_like(part.pool.initial_state)

    def everything():
        chain.step()
        pos = ops.gather_cursors(chain.cursor, chain.slots)
        ops.materialize(*pool.tensors, chain.slots, pos, copy, chain.slots)
        ops.flush(*pool.tensors, chain.slots, pos)
        pool.packed_step((part.mixed, *part.now[1:]), chain.slots)
        with ops.count_traffic():
            chain.step()
            ops.flush(*pool.tensors, chain.slots, pos)
            ops.materialize(*pool.tensors, chain.slots, pos, copy, chain.slots)

    everything()  # compiles
    with no_host_sync():
        everything()


@DIMS
def test_flush_and_packed_decode_in_a_graph(dims):
    """What an engine may capture beside the step."""
    chain = Chain(DEVICE, dims)
    part, pos = chain.parts[2], torch.zeros(3, dtype=torch.int32, device=DEVICE)
    pool, copy, out = part.pool, torch.zeros_like(part.pool.initial_state), torch.zeros_like(part.out[:, 0])

    def beside():
        pos.copy_(ops.gather_cursors(chain.cursor, chain.slots))
        ops.materialize(*pool.tensors, chain.slots, pos, copy, chain.slots)
        ops.flush(*pool.tensors, chain.slots, pos)
        flushed.copy_(pool.initial_state)
        out.copy_(pool.packed_step((part.mixed, *part.now[1:]), chain.slots))

    def prepare():
        chain.restart()
        for _ in range(3):
            chain.step()

    prepare()
    flushed = torch.zeros_like(pool.initial_state)
    replay = captured(beside)
    results = []
    for run in (beside, replay):
        prepare()
        copy.zero_()
        run()
        assert pos.tolist() == [3, 0, 3]  # row 1 has reached 20 tokens, a multiple of the interval
        results.append([t.clone() for t in (copy, flushed, out, pool.initial_state)])
    for a, b in zip(*results, strict=True):
        assert same(a, b)
    live = chain.slots.long()
    tolerance.assert_close(copy[live], flushed[live], 2 * tolerance.state(dims[2], Chain.RING), "copy")
    assert not torch.equal(flushed[live], pool.initial_state[live])


@DIMS
def test_a_graph_captured_under_the_traffic_counter_counts(dims):
    """If a call has run before it in the block, so that the counter exists."""
    ours, cpu = Chain(DEVICE, dims), Chain("cpu", dims)
    with ops.count_traffic() as traffic:
        step = captured(ours.step)
        before = traffic.totals()
        ours.run(step)
        counted = traffic.totals()
    with ops.count_traffic() as traffic:
        cpu.run(cpu.step)
    assert [new - old for new, old in zip(counted, before, strict=True)] == list(traffic.totals())
