"""`/metrics` for Prometheus, and the same numbers as JSON for the page. Everything is read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from replayssm import __version__
from replayssm.engine.stats import Histogram
from replayssm.server.service import Service


def snapshot(service: Service) -> dict[str, Any]:
    """What the engine holds now, and what it did since its start. `phase` alone while there is none."""
    found: dict[str, Any] = {"phase": service.phase, "model": service.name, "version": __version__}
    if service.phase != "ready":
        return found
    engine = service.engine
    stats, meter, slots, pages = engine.stats, engine.runner.meter, engine.slots, engine.pages
    fill = list(meter.fill.values())
    running = len(engine.scheduler.running)
    found |= {
        "context": service.context,
        "running": running,
        "waiting": max(0, service.desk.outputs - running),
        "slots": slots.slots,
        "slots_used": slots.used_slots,
        "pages": pages.pages,
        "pages_used": pages.used_pages,
        "ring_len": meter.ring_len,
        "ring_records": sum(fill),
        "finished": dict(stats.finished),
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "preemptions": stats.preemptions,
        "steps": engine.steps,
        "replay_rows": meter.replay_rows,
        "packed_rows": meter.packed_rows,
        "window_rows": meter.window_rows,
        "spec": engine.options.spec,
        "drafted": stats.drafted,
        "drafts_kept": stats.drafts_kept,
        "flushes": meter.flushes,
        "state_bytes_moved": meter.moved,
        "state_bytes_saved": meter.saved,
        "prefix": None,
    }
    if engine.prefix is not None:
        prefix = engine.prefix.stats
        found["prefix"] = {
            "asked_tokens": prefix.asked,
            "hit_tokens": prefix.hit,
            "requests": prefix.requests,
            "requests_hit": prefix.requests_hit,
            "states": engine.prefix.states.used_slots,
            "states_limit": engine.prefix.states.slots,
            "states_evicted": prefix.states_evicted,
        }
    return found


GAUGES = {
    "running": ("requests_running", "Outputs that have a slot"),
    "waiting": ("requests_waiting", "Outputs in the queue"),
    "slots": ("slots", "Slots for recurrent states"),
    "slots_used": ("slots_used", "Slots that are taken"),
    "pages": ("kv_pages", "Pages of keys and values"),
    "pages_used": ("kv_pages_used", "Pages that requests or cached prefixes hold"),
    "ring_records": ("ring_records", "Records in the rings of all slots; a ring holds ring_len"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens that were computed"),
    "cached_tokens": ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache"),
    "generated_tokens": ("generation_tokens", "Tokens of outputs"),
    "drafted": ("draft_tokens", "Tokens that were drafted"),
    "drafts_kept": ("draft_tokens_kept", "Drafts that the model took"),
    "preemptions": ("preemptions", "Times that a finished output had to make room"),
    "steps": ("engine_steps", "Steps of the engine"),
    "flushes": ("ring_flushes", "Rings folded into their states"),
    "state_bytes_moved": ("state_bytes_moved", "Bytes of state and ring that decode had to move"),
    "state_bytes_saved": ("state_bytes_saved", "Bytes that packed decode of the same tokens would have moved besides"),
}
PREFIX_COUNTERS = {
    "asked_tokens": ("prefix_asked_tokens", "Prompt tokens looked up in the prefix cache"),
    "hit_tokens": ("prefix_hit_tokens", "Prompt tokens found there with a state"),
    "requests": ("prefix_lookups", "Requests that looked"),
    "requests_hit": ("prefix_hits", "Requests that found something"),
    "states_evicted": ("prefix_states_evicted", "Kept states that made room"),
}
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "From arrival to the first token"),
    "itl": ("inter_token_latency_seconds", "Between tokens of an output"),
    "e2e": ("request_seconds", "From arrival to the end of an output"),
    "batch": ("decode_batch_size", "Rows of a decode step"),
}


class ServiceCollector(Collector):
    """All metrics of a service. Their names begin with `replayssm_`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """Read them."""
        service = self.service
        yield InfoMetricFamily("replayssm_server", "What is served", {"model": service.name, "version": __version__})
        yield GaugeMetricFamily("replayssm_ready", "1 when requests are welcome", value=float(service.healthy))
        http = CounterMetricFamily(
            "replayssm_http_responses", "Responses of HTTP by endpoint and status", labels=["endpoint", "status"]
        )
        for (endpoint, status), count in sorted(service.responses.items()):
            http.add_metric([endpoint, str(status)], count)
        yield http
        now = snapshot(service)
        if "slots" not in now:
            return
        for key, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(f"replayssm_{name}", text, value=now[key])
        yield GaugeMetricFamily(
            "replayssm_ring_len", "Records of a full ring; 0 without rings", value=now["ring_len"] or 0
        )
        for key, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"replayssm_{name}", text, value=now[key])
        ended = CounterMetricFamily("replayssm_outputs", "Outputs that ended, by reason", labels=["reason"])
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([reason], now["finished"].get(reason, 0))
        yield ended
        rows = CounterMetricFamily("replayssm_decode_rows", "Rows of decode steps by route", labels=["route"])
        for route in ("replay", "packed", "window"):
            rows.add_metric([route], now[f"{route}_rows"])
        yield rows
        if (prefix := now["prefix"]) is not None:
            for key, (name, text) in PREFIX_COUNTERS.items():
                yield CounterMetricFamily(f"replayssm_{name}", text, value=prefix[key])
            yield GaugeMetricFamily("replayssm_prefix_states", "States kept for prefixes", value=prefix["states"])
        stats = service.engine.stats
        for key, (name, text) in HISTOGRAMS.items():
            yield _histogram(f"replayssm_{name}", text, getattr(stats, key))


def _histogram(name: str, text: str, found: Histogram) -> HistogramMetricFamily:
    total, buckets = 0, []
    for bound, count in zip((*found.bounds, None), found.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else str(float(bound)), float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.sum)


def registry_of(service: Service) -> CollectorRegistry:
    """A registry with nothing else in it."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    return registry
