"""What the device can do at most: pure reads, in-place updates, and the cost of doing nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from replayssm.bench.roofline import gb_per_s, percentile

CUDA_BYTES, CUDA_BYTES_QUICK = 1536 << 20, 384 << 20
CPU_BYTES, CPU_BYTES_QUICK = 512 << 20, 128 << 20
NODES = 256
REPEATS = 7


class Ceilings(NamedTuple):
    """GB/s of a pure read and of an in-place read+write; µs of a launch that does nothing worth mentioning."""

    read: float
    read_write: float
    launch_us: float


def measure(device: torch.device, quick: bool = False) -> Ceilings:
    """Medians of a few runs over a buffer larger than any cache (smaller with `quick`)."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _cuda(device, CUDA_BYTES_QUICK if quick else CUDA_BYTES)
    x = torch.ones((CPU_BYTES_QUICK if quick else CPU_BYTES) // 4)
    one = torch.ones(1)
    size = x.numel() * 4
    return Ceilings(
        gb_per_s(size, min(_host_us(x.sum), _host_us(lambda: x.dot(x)))),
        gb_per_s(2 * size, _host_us(lambda: x.mul_(1.0))),
        _host_us(lambda: [one.add_(0) for _ in range(NODES)]) / NODES,
    )


def _cuda(device: torch.device, size: int) -> Ceilings:
    free, _ = torch.cuda.mem_get_info()
    size = min(size, free // 2) // (1 << 20) * (1 << 20)
    x = torch.ones(size // 4, device=device)
    one = torch.ones(1, device=device)
    one.add_(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NODES):
            one.add_(0)
    return Ceilings(
        gb_per_s(size, _cuda_us(_reader(x, one))),
        gb_per_s(2 * size, _cuda_us(lambda: x.mul_(1.0))),
        _cuda_us(graph.replay) / NODES,
    )


def _reader(x: torch.Tensor, sink: torch.Tensor) -> Callable[[], object]:
    try:
        from replayssm.bench import stream_kernel
    except ImportError:  # the reduction of torch reads almost as fast
        return x.sum
    return lambda: stream_kernel.read(x, sink)


def _cuda_us(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return percentile([a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)], 50)


def _host_us(run: Callable[[], object]) -> float:
    run()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return percentile(samples, 50)
