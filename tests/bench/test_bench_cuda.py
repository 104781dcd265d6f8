"""The CUDA side of timing and ceilings with a CUDA that only counts, and for real where there is a GPU."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from replayssm.bench import ceilings, timing
from replayssm.bench.case import Shape, timed_case
from replayssm.spec import LayerSpec

SHAPE = Shape(LayerSpec("gdn", 1, 2, 16, 24), 3, 4, "float32", "bfloat16", torch.device("cpu"))


class FakeCuda:
    """Events a millisecond apart; a graph that remembers what was called in it."""

    def __init__(self, monkeypatch, capture_fails=False):
        self.now, self.replays = 0.0, 0
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                fake.now += 1.0
                self.at = fake.now

            def elapsed_time(self, other):
                return other.at - self.at

        class Graph:
            def replay(self):
                fake.replays += 1

        @contextmanager
        def graph(_):
            yield
            if capture_fails:
                raise RuntimeError("operation not permitted when stream is capturing")

        for name, value in dict(Event=Event, CUDAGraph=Graph, graph=graph, synchronize=lambda: None).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 20, 8 << 20))


class Count:
    def __init__(self):
        self.calls = []

    def step(self, t, copy):
        self.calls.append((t, copy))


@pytest.mark.parametrize("capture_fails", [False, True])
def test_a_graph_is_one_period_and_a_failed_capture_is_said(monkeypatch, capture_fails):
    case, runner = timed_case(SHAPE, copies=2), Count()
    fake = FakeCuda(monkeypatch, capture_fails)
    case.shape = replace(SHAPE, device=torch.device("cuda", 0))
    timed = timing.measure(runner, case)
    one = [(t, copy) for t in range(4) for copy in range(2)]
    assert runner.calls[:8] == one
    assert timed.samples == [1e3 / 8] * 25
    assert timed.graph != capture_fails
    if capture_fails:
        assert runner.calls == one * (1 + 1 + 25)
        assert "capture failed: RuntimeError: operation not permitted" in timed.notes[0]
    else:
        assert runner.calls == one
        assert fake.replays == 1 + 25


def test_ceilings_from_the_same_clock(monkeypatch):
    FakeCuda(monkeypatch)
    monkeypatch.setattr(ceilings, "_reader", lambda x, sink: lambda: None)
    found = ceilings._cuda(torch.device("cpu"), 64 << 20)
    assert found.read == pytest.approx((4 << 20) / 1e6)
    assert found.read_write == pytest.approx(2 * found.read)
    assert found.launch_us == pytest.approx(1000 / ceilings.NODES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    from replayssm.cli import main

    found = ceilings.measure(torch.device("cuda", 0), quick=True)
    assert found.read > 100
    assert found.read_write > 100
    assert main(["bench", "decode", "--quick", "--batch", "1,8", "--state-dtype", "fp32,bf16", "--device", "cuda"]) == 0
