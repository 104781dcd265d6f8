"""A plan as one object of plain numbers: what the command prints as JSON and shows as tables."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from replayssm.planner.estimate import (
    Mode,
    RequestBytes,
    best_ring_len,
    best_ring_len_formula,
    best_ring_len_real,
    dominant_traffic,
    layer_bytes,
    layer_traffic,
    request_bytes,
    spec_bytes,
    step_traffic,
)
from replayssm.planner.request import PlanRequest
from replayssm.spec import RING_LEN_MAX, RING_LEN_MIN, Traffic

MODES: tuple[Mode, ...] = ("packed", "replay")


def report(request: PlanRequest) -> dict[str, Any]:
    """All figures, in bytes of one shard. The keys are described in `replayssm.cli.plan`."""
    geometry, settings = request.geometry, request.settings
    spec = geometry.spec
    return {
        "model": request.model.name,
        "source": request.model.source,
        "layer": asdict(spec),
        "linear_layers": geometry.linear_layers,
        "attention": asdict(geometry.attention),
        "settings": {**asdict(settings), "state_dtype_source": request.state_dtype_source, "tp": request.tp},
        "weights": {"bytes": request.weights, "source": request.weights_source},
        "request": {
            "layer": layer_bytes(geometry, settings)._asdict(),
            **{mode: _held(request_bytes(geometry, settings, mode)) for mode in MODES},
        },
        "spec": None if request.spec is None else _spec(request),
        "step": [_step(request, batch) for batch in request.batches],
        "ring": _ring(request),
        "capacity": None if request.budget is None else _capacity(request),
    }


def _held(held: RequestBytes) -> dict[str, int]:
    return {**held._asdict(), "total": held.total}


def _spec(request: PlanRequest) -> dict[str, Any]:
    """Memory of a request by strategy, and how many requests each holds for one of `snapshot`, in the same memory."""
    spec = request.spec
    assert spec is not None
    settings = replace(request.settings, ring_len=spec.ring_len)
    most = spec_bytes(request.geometry, settings, "snapshot", spec.drafts)
    found = {}
    for name in spec.strategies:
        held = spec_bytes(request.geometry, settings, name, spec.drafts)
        found[name] = {
            **_held(held),
            "per_snapshot": most.total / held.total,
            "per_snapshot_without_kv": (most.total - most.kv) / (held.total - held.kv),
        }
    return {
        "drafts": spec.drafts,
        "window": spec.drafts + 1,
        "ring_len": spec.ring_len if "ring" in found else None,
        "strategies": found,
    }


def _step(request: PlanRequest, batch: int) -> dict[str, Any]:
    spec, settings = request.geometry.spec, request.settings
    simple = dominant_traffic(spec.head_v_dim, spec.head_k_dim, settings.state_dtype)
    heads = batch * spec.num_v_heads
    row: dict[str, Any] = {"batch": batch, "layer": {}, "all": {}, "simplest": {}}
    for mode in MODES:
        one = layer_traffic(spec, settings, mode)
        row["layer"][mode] = _moved(Traffic(batch * one.read, batch * one.written))
        row["all"][mode] = _moved(step_traffic(request.geometry, settings, mode, batch))
        row["simplest"][mode] = request.geometry.linear_layers * heads * getattr(simple, mode)
    row["ratio"] = row["all"]["replay"]["total"] / row["all"]["packed"]["total"]
    return row


def _moved(traffic: Traffic) -> dict[str, float]:
    return {**traffic._asdict(), "total": traffic.total}


def _ring(request: PlanRequest) -> dict[str, Any]:
    """Bytes of a step against L, for one row, and where they are fewest."""
    spec, settings = request.geometry.spec, request.settings
    dtypes = settings.state_dtype, settings.io_dtype
    lengths = range(RING_LEN_MIN, RING_LEN_MAX + 1)
    by_length = [step_traffic(request.geometry, settings, "replay", 1, n).total for n in lengths]
    best = best_ring_len(spec, *dtypes)
    return {
        "chosen": settings.ring_len,
        "chosen_bytes": by_length[settings.ring_len - 1],
        "best": best,
        "best_bytes": by_length[best - 1],
        "best_formula": best_ring_len_formula(spec, *dtypes),
        "best_real": best_ring_len_real(spec, *dtypes),
        "packed_bytes": step_traffic(request.geometry, settings, "packed").total,
        "bytes_by_length": by_length,
    }


def _capacity(request: PlanRequest) -> dict[str, Any]:
    budget = request.budget
    assert budget is not None
    held = [(mode, 0, _held(request_bytes(request.geometry, request.settings, mode))) for mode in MODES]
    if request.spec is not None:
        for name, parts in _spec(request)["strategies"].items():
            held.append((name, request.spec.drafts, {key: parts[key] for key in held[0][2]}))
    rows = [
        {"mode": mode, "draft_tokens": drafts, **parts, "requests": budget.requests(parts["total"])}
        for mode, drafts, parts in held
    ]
    return {**asdict(budget), "rows": rows}
