"""How much of a decode step a GPU works: kernel time under torch.profiler, over step time without it.

The profiler slows launches down, not kernels. So their time is taken from a ring period that it watched, as the union
of all that ran on the device, and the step's time from the window that it did not watch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from replayssm.bench import workload
from replayssm.bench.serving_stats import union
from replayssm.engine.core import Engine

HOW = (
    "union of all device activities of one ring period of decode steps under torch.profiler, per step, over the mean "
    "step of the timed window, which ran without the profiler; rings were filled before"
)


class Busy(NamedTuple):
    """Per decode step: seconds in which the device did anything, and how many kernels and copies."""

    seconds: float
    activities: float


def measure(engine: Engine, texts: list[list[int]], tokens: int, period: int) -> Busy | None:
    """Watch `period` steps with all requests at once; None where the profiler saw nothing. The requests are aborted."""
    from torch.profiler import ProfilerActivity, profile

    made = workload.submit(engine, texts, workload.params(tokens))
    try:
        workload.ramp(engine, made)
        for _ in range(period):  # rings are emptier at first than they are on average
            engine.step()
        steps = min(period, workload.room(made))
        workload.synchronize(engine)
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(steps):
                engine.step()
            workload.synchronize(engine)
    finally:
        engine.abort_all()
    spans = [(e.time_range.start, e.time_range.end) for e in watched.events() or [] if _on_device(e)]
    return Busy(union(spans) / 1e6 / steps, len(spans) / steps) if spans and steps else None


def _on_device(event: Any) -> bool:
    """Kernels, copies and fills; not the ranges that annotate them."""
    named = event.name.startswith(("ProfilerStep", "##"))
    return event.device_type.name == "CUDA" and not named and not getattr(event, "is_user_annotation", False)
