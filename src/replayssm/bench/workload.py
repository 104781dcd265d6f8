"""Requests for an engine, and the loops that run them against the clock.

Nothing here waits for the device inside a measured loop but what `Engine.step` itself waits for: the tokens of the step
before. Both ends of a measured window are synchronised.
"""

from __future__ import annotations

import gc
import math
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from replayssm.bench.serving_stats import gaps
from replayssm.engine.core import Engine
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request


class RunError(RuntimeError):
    """A run that did something else than it should have, so that it has no time."""


@dataclass
class Steady:
    """Decode with all requests at once: `steps` steps in `seconds`, `marks` when each was over, from its start on."""

    steps: int
    seconds: float
    marks: list[float]
    route: str
    ttft: list[float] = field(default_factory=list)
    run_seconds: float = 0.0
    run_tokens: int = 0

    @property
    def step_seconds(self) -> list[float]:
        """Of each step; every request gets one token in it."""
        return gaps([0.0, *self.marks])


@dataclass
class Served:
    """Seconds of each request of an open-loop run, and of the run."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0


def prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens. The first of them do not depend on `count`."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(0, vocabulary, (count, tokens), generator=generator).tolist()
    return found


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process of `rate` a second, the first one at 0."""
    if math.isinf(rate):
        return [0.0] * count
    draw, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times


def params(tokens: int, logprobs: int | None = None) -> SamplingParams:
    """Greedy, exactly `tokens` long."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


def synchronize(engine: Engine) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if engine.slots.device.type == "cuda":
        torch.cuda.synchronize(engine.slots.device)


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Bytes: a GPU's allocations since `reset_peak_memory`, on a CPU those of the process since its start."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return dict(memory_bytes=allocated, reserved_bytes=reserved)
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return dict(memory_bytes=process, reserved_bytes=None)


def reset_peak_memory(device: torch.device) -> None:
    """See `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def submit(engine: Engine, texts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[Request]:
    """Queue all at once; they have arrived when the last one is made."""
    each = sampling if isinstance(sampling, list) else [sampling] * len(texts)
    made = [engine.make(text, one) for text, one in zip(texts, each, strict=True)]
    now = time.perf_counter()
    for request in made:
        request.arrived = now
        engine.submit(request)
    return made


def run(engine: Engine, texts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[Request]:
    """All at once, to the end, unmeasured."""
    made = submit(engine, texts, sampling)
    engine.run()
    check_finished(made)
    return made


def steady(engine: Engine, texts: list[list[int]], tokens: int, period: int) -> Steady:
    """Run all at once and measure the decode steps in which all of them run, a whole number of `period` steps."""
    synchronize(engine)
    made = submit(engine, texts, params(tokens))
    start = made[0].arrived
    ttft = ramp(engine, made)
    steps = room(made) // period * period
    if not steps:
        raise RunError(f"no {period} steps are left in which all {len(made)} requests decode")
    before = sum(request.length for request in made)
    gc.collect()
    synchronize(engine)
    marks: list[float] = []
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
        marks.append(time.perf_counter() - begin)
    synchronize(engine)
    seconds = time.perf_counter() - begin
    got = sum(request.length for request in made) - before
    route = "replay" if engine.runner.ringed else "packed"
    engine.run()
    synchronize(engine)
    whole = time.perf_counter() - start
    check_finished(made)
    if moved := sum(request.preemptions for request in made):
        raise RunError(f"requests had to make room {moved} times; the window is not one of steady decode")
    if got != steps * len(made):
        raise RunError(f"{steps} steps of {len(made)} requests made {got} tokens, expected {steps * len(made)}")
    return Steady(steps, seconds, marks, route, ttft, whole, sum(len(request.output) for request in made))


def ramp(engine: Engine, made: list[Request]) -> list[float]:
    """Step until every request has its first token; seconds that each took to get it."""
    first: dict[Request, float] = {}
    waiting = made
    while waiting:
        engine.step()
        now = time.perf_counter()
        first.update((request, now) for request in waiting if request.first_token is not None)
        waiting = [request for request in waiting if request.first_token is None]
        if any(request.finished for request in made):
            check_finished(made)
            if waiting:
                raise RunError(f"{len(waiting)} requests had no token yet when the first one ended; they must overlap")
    return [first[request] - request.arrived for request in made]


def room(made: list[Request]) -> int:
    """Steps that are left until the first request has all its tokens on the way."""
    return min(0 if request.finished else request.limit - request.length for request in made)


def serve(engine: Engine, texts: list[list[int]], times: list[float], tokens: int) -> Served:
    """Requests arrive at their `times`, whatever the engine is doing; a late submission counts as waiting."""
    sampling = params(tokens)
    made = [engine.make(text, sampling) for text in texts]
    stamps: list[list[float]] = [[] for _ in made]
    listeners = [_stamp(stamp) for stamp in stamps]
    gc.collect()
    synchronize(engine)
    start, sent = time.perf_counter(), 0
    while sent < len(made) or not engine.idle:
        now = time.perf_counter() - start
        while sent < len(made) and times[sent] <= now:
            made[sent].arrived = start + times[sent]
            engine.submit(made[sent], listeners[sent])
            sent += 1
        if engine.idle:
            time.sleep(min(max(0.0, start + times[sent] - time.perf_counter()), 0.01))
        else:
            engine.step()
    seconds = time.perf_counter() - start
    check_finished(made)
    found = Served(seconds=seconds, preemptions=sum(request.preemptions for request in made))
    for request, stamp in zip(made, stamps, strict=True):
        if len(stamp) != len(request.output):
            raise RunError(f"{request} made {len(request.output)} tokens in {len(stamp)} calls of its listener")
        found.ttft.append(stamp[0] - request.arrived)
        found.e2e.append(stamp[-1] - request.arrived)
        found.itl += gaps(stamp)
        if len(stamp) > 1:
            found.tpot.append((stamp[-1] - stamp[0]) / (len(stamp) - 1))
        found.tokens += len(stamp)
    return found


def check_finished(made: list[Request]) -> None:
    """Raise what stopped a request early."""
    for request in made:
        if request.finished and request.reason != "length":
            raise RunError(f"{request} ended with {request.reason!r}: {request.error}")


def _stamp(into: list[float]) -> Callable[[Request, str], None]:
    def listener(request: Request, text: str) -> None:
        into.append(time.perf_counter())

    return listener
