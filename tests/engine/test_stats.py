"""The host's account of rings against the cursors on the device and the bytes that the ops counted."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from replayssm.engine.stats import Histogram
from tests.engine.common import engine_of, greedy, prompts_of, random_tokens, run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ring_len": 1},
        {"snapshot_interval": 6},
        {"mode": "packed"},
        {"prefix_cache": True, "prefix_interval": 4},
        {"pages": 16, "context": 64},
        {"pages": 16, "context": 64, "preempt": "recompute"},
    ],
)
def test_fill_and_bytes_are_those_of_the_device(options):
    with torch.inference_mode(), engine_of(**options) as engine, ops.count_traffic() as traffic:
        meter, slots = engine.runner.meter, engine.slots

        def check(engine):
            for request in engine.scheduler.running:
                if slots.ring_len is not None:
                    assert int(slots.cursor[request.slot]) == meter.fill.get(request.slot, 0)

        requests = [engine.add(random_tokens(length), greedy(17 + length % 5)) for length in (3, 9, 14, 20, 26)]
        run(engine, check)
        check(engine)
        found, layers = traffic.totals(), len(engine.slots.state)
    assert {request.error for request in requests} == {None}
    assert meter.fill == {}
    assert layers * (meter.replay_rows + meter.packed_rows) == found.rows
    assert meter.flushes * layers == found.flushes
    copies = 0
    if engine.prefix is not None:  # what the prefix cache copies is no decode
        copies = found.state_read + found.state_written + found.ring_read + found.ring_written - meter.moved
        assert copies > 0
    assert meter.moved + copies == sum(found[:4])
    if "pages" in options:
        assert engine.stats.preemptions > 0
    if options.get("ring_len", 4) > 1 and options.get("mode") != "packed" and engine.prefix is None:
        assert meter.saved > 0


def test_counts_of_outputs_and_times():
    with engine_of() as engine:
        done = [engine.add(prompt, greedy(5)) for prompt in prompts_of("qwen3_5_text")[:3]]
        gone = engine.add(random_tokens(6), greedy(20))
        engine.step()
        engine.abort(gone)
        run(engine)
        stats = engine.stats
    assert stats.finished == {"length": 3, "abort": 1}
    assert stats.generated_tokens == sum(len(request.output) for request in [*done, gone])
    assert sum(stats.ttft.counts) == 4
    assert sum(stats.itl.counts) == stats.generated_tokens - 4
    assert sum(stats.e2e.counts) == 4
    # one token that continues a state is a decode step, also in a prompt
    assert stats.prompt_tokens <= sum(len(request.prompt) for request in [*done, gone])
    assert stats.batch.sum >= stats.generated_tokens - 4
    assert 0 < stats.ttft.sum <= stats.e2e.sum


def test_histogram_counts_a_value_at_its_bound_below_it():
    found = Histogram((1, 2, 4))
    for value in (0, 1, 1.5, 4, 9):
        found.add(value)
    assert found.counts == [2, 1, 1, 1]
    assert found.sum == 15.5
