"""Loops against the clock, on a tiny model with random weights."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replayssm.bench import serving_busy, serving_model, workload
from replayssm.engine.core import Engine
from replayssm.engine.options import EngineOptions
from replayssm.models.families import layer_specs
from replayssm.models.loading import LoadedModel
from tests.models.tiny import VOCAB, config_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded():
    config = config_of("qwen3_5_text")
    model = serving_model.random_model(config, torch.float32, CPU)
    return LoadedModel(model, None, Path("tiny"), config, layer_specs(config))


@pytest.fixture
def engine(loaded):
    engine = Engine(loaded, EngineOptions(ring_len=4, mode="replay", max_requests=3, chunk_tokens=8, context=64))
    yield engine
    engine.close()


def texts(count, tokens=6):
    return workload.prompts(count, tokens, VOCAB, 0)


def test_prompts_do_not_depend_on_their_number():
    assert texts(2) == texts(5)[:2]
    assert texts(2) != workload.prompts(2, 6, VOCAB, 1)
    assert {len(text) for text in texts(5)} == {6}


def test_arrivals_are_a_poisson_process():
    times = workload.arrivals(4.0, 4001, 7)
    assert times[0] == 0
    assert times == workload.arrivals(4.0, 4001, 7) != workload.arrivals(4.0, 4001, 8)
    waits = [b - a for a, b in pairwise(times)]
    mean = sum(waits) / len(waits)
    spread = math.sqrt(sum((x - mean) ** 2 for x in waits) / len(waits))
    assert min(waits) > 0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert spread == pytest.approx(0.25, rel=0.1)  # exponential
    assert workload.arrivals(math.inf, 3, 0) == [0, 0, 0]


def test_the_window_is_whole_ring_periods_with_everybody_in_it(engine):
    found = workload.steady(engine, texts(3), 20, 4)
    # chunks of 8: 6 + 2, 4 + 4, 2 tokens of prompts; the first request is two tokens ahead
    assert found.steps == 16
    assert len(found.marks) == found.steps
    assert found.marks[-1] <= found.seconds <= found.run_seconds
    assert sum(found.step_seconds) == pytest.approx(found.marks[-1])
    assert found.run_tokens == 60
    assert found.route == "replay"
    assert found.ttft[0] < found.ttft[2]
    assert engine.idle
    assert engine.slots.free_slots == 3


def test_requests_that_do_not_overlap_have_no_window(engine):
    with pytest.raises(workload.RunError, match="they must overlap"):
        workload.steady(engine, texts(3), 2, 4)
    engine.abort_all()
    with pytest.raises(workload.RunError, match="no 4 steps are left"):
        workload.steady(engine, texts(3), 5, 4)
    engine.abort_all()
    assert engine.slots.free_slots == 3


@pytest.mark.parametrize("how", ["preempts", "skips"])
def test_a_window_that_is_not_steady_has_no_time(engine, monkeypatch, how):
    real, calls = engine.step, []

    def step():
        calls.append(1)
        if len(calls) == 8 and how == "preempts":
            engine.scheduler._evict(engine.scheduler.running[-1])
        if len(calls) != 8 or how == "preempts":
            real()

    monkeypatch.setattr(engine, "step", step)
    said = "had to make room 1 times" if how == "preempts" else "20 steps of 3 requests made 57 tokens, expected 60"
    with pytest.raises(workload.RunError, match=said):
        workload.steady(engine, texts(3), 24, 4)


def test_what_stops_a_request_is_said(engine, monkeypatch):
    def launch(step, drafts=None):
        raise ValueError("out of luck")

    monkeypatch.setattr(engine.runner, "launch", launch)
    for go in (
        lambda: workload.run(engine, texts(2), workload.params(4)),
        lambda: workload.steady(engine, texts(2), 8, 4),
        lambda: workload.serve(engine, texts(2), [0.0, 0.0], 4),
    ):
        with pytest.raises(workload.RunError, match="ended with 'error': ValueError: out of luck"):
            go()


def test_requests_arrive_when_they_are_due(engine):
    times = [0.0, 0.0, 0.0, 0.0, 0.15]
    found = workload.serve(engine, texts(5), times, 4)
    assert found.tokens == 20
    assert [len(x) for x in (found.ttft, found.tpot, found.itl, found.e2e)] == [5, 5, 15, 5]
    assert all(0 < a < b for a, b in zip(found.ttft, found.e2e, strict=True))
    assert found.ttft[3] > found.ttft[0]  # three slots: it waited, and that counts
    assert found.seconds >= 0.15 + found.e2e[4]
    total = sum(found.e2e) - sum(found.ttft)
    assert total == pytest.approx(sum(found.itl)) == pytest.approx(3 * sum(found.tpot))


def test_one_token_has_no_time_per_token(engine):
    found = workload.serve(engine, texts(2), [0.0, 0.0], 1)
    assert found.tpot == found.itl == []
    assert found.ttft == found.e2e


def test_busy_is_the_union_of_what_ran_on_the_device(engine, monkeypatch):
    def event(name, start, end, device="CUDA", annotation=False):
        span, kind = SimpleNamespace(start=start, end=end), SimpleNamespace(name=device)
        return SimpleNamespace(name=name, time_range=span, device_type=kind, is_user_annotation=annotation)

    events = [
        event("kernel", 0, 100), event("copy", 50, 150), event("aten::mm", 0, 999, "CPU"), event("late", 300, 310),
        event("range", 0, 999, annotation=True), event("## Call", 0, 999), event("ProfilerStep#1", 0, 999),
    ]  # fmt: skip
    made = []

    class Profile:
        def __init__(self, activities):
            made.append(engine.steps)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            made.append(engine.steps)

        def events(self):
            return events

    monkeypatch.setattr("torch.profiler.profile", Profile)
    found = serving_busy.measure(engine, texts(3), 20, 4)
    assert made[1] - made[0] == 4
    assert found.seconds == pytest.approx(160e-6 / 4)
    assert found.activities == 3 / 4
    assert engine.idle
    events.clear()
    assert serving_busy.measure(engine, texts(3), 20, 4) is None
