"""Microseconds per step over whole ring periods.

One sample is one period: each step of the schedule on each copy in turn, one CUDA graph of all launches where there
are graphs. The spread is that of the samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from replayssm.bench.case import Case, Shape
from replayssm.bench.kernels import Runner

CPU_WORKING_SET = 64 << 20
CPU_WORKING_SET_QUICK = 8 << 20
MAX_COPIES = 1024
CPU_BUDGET_S = 10.0  # of samples, per row


@dataclass
class Timing:
    """`samples` in µs per step."""

    samples: list[float]
    steps: int
    graph: bool
    notes: list[str] = field(default_factory=list)


def wanted_bytes(device: torch.device, quick: bool) -> int:
    """The working set must exceed this: 3 × L2 on a GPU, a fixed size on a CPU."""
    if device.type == "cuda":
        return 3 * torch.cuda.get_device_properties(device).L2_cache_size
    return CPU_WORKING_SET_QUICK if quick else CPU_WORKING_SET


def copies_for(shape: Shape, wanted: int) -> int:
    """The fewest copies whose states together are larger than `wanted` bytes."""
    return min(MAX_COPIES, wanted // shape.state_bytes + 1)


def period(runner: Runner, case: Case) -> None:
    """Every step of the schedule on every copy."""
    for t in range(len(case.force)):
        for copy in range(case.copies):
            runner.step(t, copy)


def measure(runner: Runner, case: Case, quick: bool = False) -> Timing:
    """Time whole periods. The caller has run one already, so that everything is compiled."""
    steps = len(case.force) * case.copies
    if case.shape.device.type != "cuda":
        return _host(lambda: period(runner, case), steps, quick)
    with torch.cuda.device(case.shape.device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                period(runner, case)
        except Exception as error:  # whatever a kernel does that a graph cannot hold
            torch.cuda.synchronize()
            note = f"timed without a CUDA graph, capture failed: {type(error).__name__}: {str(error)[:120]}"
            return Timing(_events(lambda: period(runner, case), steps, quick), steps, False, [note])
        return Timing(_events(graph.replay, steps, quick), steps, True)


def _events(run: Callable[[], None], steps: int, quick: bool) -> list[float]:
    samples = 5 if quick else 25
    run()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 / steps for a, b in pairwise(marks)]


def _host(run: Callable[[], None], steps: int, quick: bool) -> Timing:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < (2 if quick else 7):
        if len(samples) >= 2 and time.perf_counter() - begin > CPU_BUDGET_S:
            break
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6 / steps)
    return Timing(samples, steps, False)
