"""Check and time every kernel at every batch size and state dtype.

A row that fails its check, or whose timed period does not move the bytes that it must, has no time. A row is a dict:

    batch, state_dtype, kernel        which; kernel is "packed", "replay" or a peer's name
    route, peer                       "packed" or "replay"; whether it is another package's
    status, error                     "ok" or "failed", and why
    check                             output, output_limit, state, state_limit: relative errors; null if it crashed
    us, us_p10, us_p90                median and spread of µs per step; null if failed
    periods, steps                    samples, each a whole ring period; steps in one of them
    bytes, gb_per_s                   what one step must move, and how fast it did
    ceiling, of_ceiling               "read" or "read_write", and the fraction of it
    vs_packed, vs_best_peer           times faster than those of the same batch and state dtype
    auto_route, auto_vs_packed        on our replay rows: what mode auto takes at this batch, and how many times faster
                                      than packed that is (the same call, so it is not timed again); null elsewhere
    copies, working_set               states cycled through, and their bytes (without rings)
    graph, notes                      whether it was a CUDA graph; what else to know
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from replayssm import ops
from replayssm.bench import timing
from replayssm.bench.case import Case, Shape, timed_case
from replayssm.bench.ceilings import Ceilings
from replayssm.bench.check import check
from replayssm.bench.kernels import Own, Runner
from replayssm.bench.peers import PEERS, Peer
from replayssm.bench.request import BenchRequest
from replayssm.bench.roofline import CEILING_OF, add_ratios, gb_per_s, percentile, step_bytes
from replayssm.kernels.policy import Route, decode_route
from replayssm.spec import DTYPE_BYTES

OWN: tuple[Route, ...] = ("packed", "replay")


def run(
    request: BenchRequest,
    device: torch.device,
    ceilings: Ceilings,
    progress: Callable[[str], AbstractContextManager[Any]],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All rows, and for each peer that was left out the reason."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _run(request, device, ceilings, progress)


def _run(
    request: BenchRequest,
    device: torch.device,
    ceilings: Ceilings,
    progress: Callable[[str], AbstractContextManager[Any]],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for state_dtype in request.state_dtypes:
        for batch in request.batches:
            shape = Shape(request.spec, batch, request.ring_len, state_dtype, request.io_dtype, device)
            entries: list[tuple[str, Route, Callable[[Case], Runner], Peer | None]] = []
            entries += [(route, route, partial(Own, route=route), None) for route in OWN]
            for peer in PEERS:
                if peer.kind not in (None, request.spec.kind):
                    continue
                why = peer.skip(shape)
                if why is None:
                    entries.append((peer.name, peer.route, peer.make, peer))
                else:
                    skipped[f"{peer.name}, state {state_dtype}"] = why
            for name, route, make, of in entries:
                with progress(f"{name}, B = {batch}, state {state_dtype}"):
                    row = _row(shape, name, route, of)
                    _fill(row, shape, make, ceilings, request.quick, of.tolerance if of else 0.0)
                    rows.append(row)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    add_ratios(rows)
    return rows, skipped


def _row(shape: Shape, name: str, route: Route, peer: Peer | None) -> dict[str, Any]:
    moved = step_bytes(shape.spec, route, shape.batch, shape.ring_len, shape.state_dtype, shape.io_dtype)
    row: dict[str, Any] = dict(batch=shape.batch, state_dtype=shape.state_dtype, kernel=name, route=route)
    row |= dict(peer=peer is not None, status="failed", error=None, check=None)
    row |= dict.fromkeys(("us", "us_p10", "us_p90", "periods", "steps"))
    row |= dict(bytes=moved, gb_per_s=None, ceiling=CEILING_OF[route], of_ceiling=None)
    row |= dict.fromkeys(("vs_packed", "vs_best_peer", "auto_route", "auto_vs_packed"))
    row |= dict.fromkeys(("copies", "working_set", "graph"))
    if name == "replay":
        heads, size = shape.batch * shape.spec.num_v_heads, DTYPE_BYTES[shape.state_dtype]
        row["auto_route"] = decode_route(shape.device.type, shape.spec.is_kda, size, heads, shape.ring_len)
    return row | dict(notes=list(peer.notes) if peer else [])


def _fill(
    row: dict[str, Any], shape: Shape, make: Callable[[Case], Runner], ceilings: Ceilings, quick: bool, tolerance: float
) -> None:
    try:
        verdict = check(shape, row["route"], make, tolerance)
        row["check"] = verdict._asdict()
        if not verdict.ok:
            row["error"] = str(verdict)
            return
        wanted = timing.wanted_bytes(shape.device, quick)
        case = timed_case(shape, timing.copies_for(shape, wanted))
        runner = make(case)
        row["error"] = _first_period(runner, case, None if row["peer"] else row["bytes"])
        if row["error"] is not None:
            return
        timed = timing.measure(runner, case, quick)
    except Exception as error:  # a row that cannot run is a result; the others still count
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return
    us = percentile(timed.samples, 50)
    row |= dict(status="ok", us=us, us_p10=percentile(timed.samples, 10), us_p90=percentile(timed.samples, 90))
    row |= dict(periods=len(timed.samples), steps=timed.steps, graph=timed.graph)
    row |= dict(copies=case.copies, working_set=case.copies * shape.state_bytes)
    row["gb_per_s"] = gb_per_s(row["bytes"], us)
    row["of_ceiling"] = row["gb_per_s"] / getattr(ceilings, row["ceiling"])
    row["notes"] += timed.notes
    if row["working_set"] <= wanted:
        row["notes"].append(f"working set of {row['working_set']} bytes is not above {wanted}")


def _first_period(runner: Runner, case: Case, step_bytes: float | None) -> str | None:
    """Run a period uncounted by the clock and count what it moves. Returns what is wrong with it, or None.

    This is what compiles, and what proves that a period has as many appends and flushes as its bytes say.
    """
    with ops.count_traffic() as counted:
        timing.period(runner, case)
    if step_bytes is None:
        return None
    moved = sum(counted.totals()[:4])
    want = step_bytes * len(case.force) * case.copies
    return None if abs(moved - want) < 0.5 else f"a period moves {moved:.0f} bytes, expected {want:.0f}"
