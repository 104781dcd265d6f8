"""Throughput and latency of the engine, mode by mode; a check before every number.

One engine for each mode and state dtype serves all its rows; only one exists at a time. Packed decode comes first, also
where no row asks for it: the others are checked against what it says. A row that fails its check has no time. Seconds
are in milliseconds, as {mean, median, p99}, in `latency` with p90.

Rows of both:

    mode, state_dtype                 which
    status, error                     "ok" or "failed", and why
    check                             see `replayssm.bench.serving_check`; null if it could not be made
    memory_bytes                      peak of the GPU's allocations in the run; on a CPU of the process so far
    reserved_bytes                    peak of what torch holds on the GPU, graphs and caches included; null on a CPU
    ttft_ms, tpot_ms                  to the first token of a request, per token after it
    vs_packed                         rate over that of packed decode with the same load and state dtype
    notes                             what else to know

Throughput, all requests at once:

    batch                             requests
    decode_tokens_per_s               in the window: the decode steps in which all requests run, whole ring periods
    tokens_per_s                      output tokens over the whole run, prompts included
    tpot_ms                           of the steps of the window; each request gets one token a step
    route                             "replay" or "packed" in the window
    steps, periods, seconds           the window
    gpu_busy                          fraction of a step in which the GPU works, see `serving_busy`; null on a CPU
    gpu_ms, gpu_activities            per step: that time, and kernels and copies

Latency, requests that arrive by themselves:

    rate, requests                    a second (null: all at once), and how many
    tokens_per_s, seconds             output tokens over the whole run, and its length
    itl_ms, e2e_ms                    between tokens; from arrival to the last token
    preemptions                       requests that had to make room
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from replayssm.bench import serving_busy, serving_check, workload
from replayssm.bench.serving_request import LatencyRequest, ServingRequest, ThroughputRequest
from replayssm.bench.serving_stats import LONG, add_ratios, summary
from replayssm.engine.core import Engine
from replayssm.engine.options import Mode
from replayssm.errors import MemoryBudgetError, OptionError
from replayssm.models.loading import LoadedModel
from replayssm.state import MemoryPlan, SlotPool, on

Progress = Callable[[str], AbstractContextManager[Any]]
OnPlan = Callable[[dict[str, Any]], None]
CHECKED_REQUESTS = {"cuda": 32, "cpu": 4}  # at once, of `latency`: on a GPU enough for mode auto to replay


@dataclass
class Result:
    """Rows, and the memory plan of each engine."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)


def throughput(
    request: ThroughputRequest, loaded: LoadedModel, context: int, progress: Progress, say: OnPlan
) -> Result:
    """All rows; `say` hears of each engine's memory plan. Raises `OptionError` when a batch does not fit."""
    with on(loaded.model.device):
        found = _each_engine(request, loaded, context, progress, say, _Throughput(request))
    order = {mode: i for i, mode in enumerate(request.modes)}
    found.rows.sort(
        key=lambda r: (
            request.state_dtypes.index(r["state_dtype"]),
            request.batches.index(r["batch"]),
            order[r["mode"]],
        )
    )
    add_ratios(found.rows, "batch", "decode_tokens_per_s")
    return found


def latency(request: LatencyRequest, loaded: LoadedModel, context: int, progress: Progress, say: OnPlan) -> Result:
    """Likewise; more requests than slots wait for one."""
    with on(loaded.model.device):
        found = _each_engine(request, loaded, context, progress, say, _Latency(request))
    order = {mode: i for i, mode in enumerate(request.modes)}
    rates = [_json_rate(rate) for rate in request.rates]
    found.rows.sort(
        key=lambda r: (request.state_dtypes.index(r["state_dtype"]), rates.index(r["rate"]), order[r["mode"]])
    )
    add_ratios(found.rows, "rate", "tokens_per_s")
    return found


def _each_engine(
    request: ServingRequest,
    loaded: LoadedModel,
    context: int,
    progress: Progress,
    say: OnPlan,
    suite: _Throughput | _Latency,
) -> Result:
    found = Result()
    others: list[Mode] = [mode for mode in request.modes if mode != "packed"]
    modes: list[Mode] = ["packed", *others]
    for state_dtype in request.state_dtypes:
        suite.references.clear()
        for mode in modes:
            wanted = mode in request.modes
            with progress(f"engine, mode {mode}, state {state_dtype}"):
                engine = _engine(request, loaded, context, mode, state_dtype)
            try:
                if not found.plans:
                    _check_room(request, loaded, engine)
                if wanted:
                    found.plans.append(_plan(mode, state_dtype, engine.plan))
                    say(found.plans[-1])
                suite.run(engine, mode, state_dtype, wanted, progress, found.rows)
            finally:
                engine.close()
                del engine
                _free(loaded)
    return found


@dataclass
class _Throughput:
    request: ThroughputRequest
    references: dict[int, serving_check.Reference] = field(default_factory=dict)

    def run(
        self,
        engine: Engine,
        mode: Mode,
        state_dtype: str,
        wanted: bool,
        progress: Progress,
        rows: list[dict[str, Any]],
    ) -> None:
        """Rows of one engine; only the check's side of them unless `wanted`."""
        for batch in self.request.batches:
            row: dict[str, Any] = dict(batch=batch, mode=mode, state_dtype=state_dtype, status="failed", error=None)
            row |= dict.fromkeys(("check", "route", "decode_tokens_per_s", "tokens_per_s", "tpot_ms", "ttft_ms"))
            row |= dict.fromkeys(("steps", "periods", "seconds", "memory_bytes", "reserved_bytes", "gpu_busy"))
            row |= dict(gpu_ms=None, gpu_activities=None, vs_packed=None, notes=[])
            with progress(f"B = {batch}, mode {mode}, state {state_dtype}" + ("" if wanted else ", for the check")):
                _guarded(engine, row, partial(self._fill, engine, batch, row, wanted))
            if wanted:
                rows.append(row)

    def _fill(self, engine: Engine, batch: int, row: dict[str, Any], wanted: bool) -> None:
        args = self.request.args
        period, tokens = args.ring_len, args.output_tokens
        texts = workload.prompts(batch, args.prompt_tokens, engine.vocabulary, args.seed)
        # This run compiles and records graphs, too: it has the sizes of the one that is timed.
        if not _check(engine, texts, tokens, batch, self.references, row) or not wanted:
            return
        workload.reset_peak_memory(engine.slots.device)
        timed = workload.steady(engine, texts, tokens, period)
        row |= workload.peak_memory(engine.slots.device)
        step = timed.seconds / timed.steps
        # The last step's end is that of the device, which no mark saw: the mean is the window's, not the marks'.
        row["tpot_ms"] = {**(summary(timed.step_seconds) or {}), "mean": 1e3 * step}
        row |= dict(ttft_ms=summary(timed.ttft), route=timed.route, decode_tokens_per_s=batch / step)
        row |= dict(tokens_per_s=timed.run_tokens / timed.run_seconds, steps=timed.steps)
        row |= dict(periods=timed.steps // period, seconds=timed.seconds)
        row |= dict(status="ok", notes=_graph_notes(engine))
        if engine.slots.device.type == "cuda":
            _watch(engine, texts, tokens, period, step, row)


@dataclass
class _Latency:
    request: LatencyRequest
    references: dict[int, serving_check.Reference] = field(default_factory=dict)

    def run(
        self,
        engine: Engine,
        mode: Mode,
        state_dtype: str,
        wanted: bool,
        progress: Progress,
        rows: list[dict[str, Any]],
    ) -> None:
        """Rows of one engine; only the check's side of them unless `wanted`."""
        request, args = self.request, self.request.args
        empty: dict[str, Any] = dict(rate=None, requests=request.count, mode=mode, state_dtype=state_dtype)
        empty |= dict(status="failed", error=None)
        empty |= dict.fromkeys(("check", "tokens_per_s", "seconds", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"))
        empty |= dict(preemptions=None, memory_bytes=None, reserved_bytes=None, vs_packed=None, notes=[])
        small = min(CHECKED_REQUESTS[engine.slots.device.type], request.count, engine.plan.slots)
        texts = workload.prompts(small, args.prompt_tokens, engine.vocabulary, args.seed)
        with progress(f"check and warm-up, mode {mode}, state {state_dtype}"):
            tokens = args.output_tokens
            checked = _guarded(engine, empty, partial(_check, engine, texts, tokens, small, self.references, empty))
            checked = checked and (not wanted or _guarded(engine, empty, partial(self._warm, engine)))
        if not wanted:
            return
        for rate in request.rates:
            row = {**empty, "rate": _json_rate(rate), "notes": _graph_notes(engine)}
            if checked:
                with progress(f"rate {rate:g}, mode {mode}, state {state_dtype}"):
                    _guarded(engine, row, partial(self._fill, engine, rate, row))
            rows.append(row)

    def _warm(self, engine: Engine) -> None:
        """Record what the arrivals can ask for: each size of a batch that has a graph of its own."""
        args, most = self.request.args, min(self.request.count, engine.plan.slots)
        graphs = engine.runner.graphs
        sizes = [most] if graphs is None else [min(size, most) for size in graphs.buckets]
        for size in sorted(set(sizes), reverse=True):
            tokens = min(args.output_tokens, self.request.ramp(size) + 2)
            texts = workload.prompts(size, args.prompt_tokens, engine.vocabulary, args.seed + 1)
            workload.run(engine, texts, workload.params(tokens))
        # Longer contexts may have graphs of their own; the largest batch passes through all of them.
        texts = workload.prompts(most, args.prompt_tokens, engine.vocabulary, args.seed + 1)
        workload.run(engine, texts, workload.params(args.output_tokens))

    def _fill(self, engine: Engine, rate: float, row: dict[str, Any]) -> None:
        args, count = self.request.args, self.request.count
        texts = workload.prompts(count, args.prompt_tokens, engine.vocabulary, args.seed)
        workload.reset_peak_memory(engine.slots.device)
        served = workload.serve(engine, texts, workload.arrivals(rate, count, args.seed), args.output_tokens)
        row |= workload.peak_memory(engine.slots.device) | dict(seconds=served.seconds)
        row |= dict(tokens_per_s=served.tokens / served.seconds, preemptions=served.preemptions)
        for name in ("ttft", "tpot", "itl", "e2e"):
            row[f"{name}_ms"] = summary(getattr(served, name), LONG)
        row["status"] = "ok"


def _graph_notes(engine: Engine) -> list[str]:
    """Why an engine that should have recorded graphs runs without."""
    failure = getattr(engine.runner.graphs, "failure", None)
    return [] if failure is None else [f"decode ran without CUDA graphs: {failure}"]


def _watch(engine: Engine, texts: list[list[int]], tokens: int, period: int, step: float, row: dict[str, Any]) -> None:
    """Fill in what the GPU did; without a working profiler the row keeps its other numbers."""
    try:
        busy = serving_busy.measure(engine, texts, tokens, period)
    except Exception as error:
        row["notes"].append(f"no gpu_busy: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return
    if busy is None:
        row["notes"].append("no gpu_busy: torch.profiler saw no work on the device")
        return
    row |= dict(gpu_busy=min(1.0, busy.seconds / step), gpu_ms=1e3 * busy.seconds, gpu_activities=busy.activities)


def _check(
    engine: Engine,
    texts: list[list[int]],
    tokens: int,
    key: int,
    references: dict[int, serving_check.Reference],
    row: dict[str, Any],
) -> bool:
    """Run a batch and judge it; packed decode leaves its reference under `key`."""
    made = workload.run(engine, texts, serving_check.sampling(len(texts), tokens))
    said = serving_check.transcripts(made)
    if row["mode"] == "packed":
        found = serving_check.reference(engine, said)
        verdict = serving_check.judge_packed(found)
        if verdict.ok:
            references[key] = found
    elif key not in references:
        raise workload.RunError("packed decode, which this is checked against, did not pass its own check")
    else:
        verdict = serving_check.judge(said, references[key])
    row["check"] = verdict.as_json()
    row["error"] = None if verdict.ok else str(verdict)
    return verdict.ok


def _guarded(engine: Engine, row: dict[str, Any], work: Callable[[], bool | None]) -> bool:
    """A row that cannot run is a result; the others still count. False when it failed."""
    try:
        return work() is not False
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        engine.abort_all()
        return False


def _engine(request: ServingRequest, loaded: LoadedModel, context: int, mode: Mode, state_dtype: str) -> Engine:
    """Raises `OptionError` with both numbers when the plan has fewer slots than the batches need."""
    most = request.most
    try:
        return Engine(loaded, request.engine_options(mode, state_dtype, context, most))
    except MemoryBudgetError:
        if most is None or most == 1:
            raise
        small = Engine(loaded, request.engine_options(mode, state_dtype, context, 1))
        fits = min(most - 1, _fits(small.plan, small.plan.slot_bytes, request.tokens))
        small.close()
        raise _too_many(request, fits, mode, state_dtype, small.plan) from None


def _check_room(request: ServingRequest, loaded: LoadedModel, engine: Engine) -> None:
    """Before minutes of work: whether every engine that comes will hold the largest batch, by the plan of the first."""
    if (most := request.most) is None:
        return
    io_dtype = str(engine.slots.conv.dtype).removeprefix("torch.")
    for state_dtype in request.state_dtypes:
        for mode in request.modes:
            ring = None if mode == "packed" else request.args.ring_len
            slot = SlotPool.slot_bytes(loaded.specs, ring, state_dtype, io_dtype)
            if (fits := _fits(engine.plan, slot, request.tokens)) < most:
                raise _too_many(request, fits, mode, state_dtype, engine.plan)


def _fits(plan: MemoryPlan, slot_bytes: int, tokens: int) -> int:
    """Requests of `tokens` tokens that can run at once."""
    pages = -(-tokens // plan.page_size)
    return max(0, plan.budget - plan.weights - plan.work - 2 * plan.page_bytes) // (
        slot_bytes + pages * plan.page_bytes
    )


def _too_many(request: ServingRequest, fits: int, mode: str, state_dtype: str, plan: MemoryPlan) -> OptionError:
    option = "--batch" if request.suite == "throughput" else "--max-requests"
    return OptionError(
        f"{option} {request.most} exceeds the {fits} slots that {_gib(plan.budget)} hold in mode {mode} with state "
        f"{state_dtype}, besides weights of {_gib(plan.weights)} and {_gib(plan.work)} to work with; ask for fewer, or "
        "raise --memory-fraction"
    )


def _plan(mode: str, state_dtype: str, plan: MemoryPlan) -> dict[str, Any]:
    found: dict[str, Any] = dict(mode=mode, state_dtype=state_dtype, budget=plan.budget, split=dict(plan.split()))
    return found | dict(slots=plan.slots, tokens=plan.tokens, page_size=plan.page_size)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _json_rate(rate: float) -> float | None:
    return None if math.isinf(rate) else rate


def _free(loaded: LoadedModel) -> None:
    gc.collect()
    if loaded.model.device.type == "cuda":
        torch.cuda.empty_cache()
