"""`replayssm check`: the linear layers of a model, by packed and by replay decode, against a serial fp64 recurrence.

Limits, for T steps and ring length L, with u half the spacing of a dtype at 1 (docs/mathematics.md, section 6):

    state  n·u(state) + 8·T·u(float32), n roundings of the state: T + 1 for packed, ⌈T/L⌉ + 2 for replay
    output u(activations) + 4·(the state's limit)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm import ops
from replayssm.cli.console import counter, print_json, print_table, step
from replayssm.cli.decoding import encode, load, state_dtype
from replayssm.cli.options import CheckRequest
from replayssm.cli.record import LayerRecord, record
from replayssm.reference import serial
from replayssm.spec import STATE_DTYPES


@dataclass(frozen=True)
class Measured:
    """One number, its limit, and where it was measured."""

    layer: int
    what: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Within the limit; NaN is not."""
        return self.error <= self.limit


def run_command(request: CheckRequest) -> int:
    """Return 0, or 1 when a limit is exceeded."""
    args, text, tokens, decode = request
    with step(f"loading {args.model}"):
        loaded = load(args.model, args.dtype, args.device)
        prompt = encode(loaded, text, tokens + 1)
        dtype = state_dtype(loaded, decode)
    with counter("recording the inputs of the linear layers", tokens) as tick:
        records = record(loaded, prompt, tokens, tick)
    measured: list[Measured] = []
    with counter("comparing the layers with the fp64 recurrence", len(records)) as tick:
        for layer in records:
            measured += check_layer(layer, decode.ring_len)
            tick()

    print_report(args, measured, dtype.name, decode.ring_len, tokens)
    failed = [m for m in measured if not m.ok]
    for m in failed[:10]:
        print(f"FAILED layer {m.layer}, {m.what}: {m.error:.2e} exceeds {m.limit:.2e}")
    print(f"{len(measured) - len(failed)} of {len(measured)} measurements within their limits")
    if args.json:
        result: dict[str, Any] = {
            "model": args.model,
            "tokens": tokens,
            "ring_len": decode.ring_len,
            "state_dtype": dtype.name,
            "ok": not failed,
            "measurements": [{**vars(m), "ok": m.ok} for m in measured],
        }
        print_json(result, args.out)
    return 1 if failed else 0


def check_layer(layer: LayerRecord, ring_len: int) -> list[Measured]:
    """Errors of both routes with each state dtype, and of a ring of length 1 against packed decode."""
    steps = len(layer.steps)
    true_out, true_state = oracle(layer)
    result = []
    for name in STATE_DTYPES:
        dtype = getattr(torch, name)
        routes = {"packed": (run_packed(layer, dtype), steps + 1)}
        routes["replay"] = (run_replay(layer, dtype, ring_len), -(-steps // ring_len) + 2)
        for route, ((out, state), roundings) in routes.items():
            limit = roundings * _unit(dtype) + 8 * steps * _unit(torch.float32)
            out_limit = _unit(layer.mixed_qkv.dtype) + 4 * limit
            result.append(Measured(layer.index, f"{name} {route} state", relative_error(state, true_state), limit))
            result.append(Measured(layer.index, f"{name} {route} output", relative_error(out, true_out), out_limit))
    packed, single = run_packed(layer, torch.float32), run_replay(layer, torch.float32, 1)
    error = max(relative_error(x, y) for x, y in zip(single, packed, strict=True))
    result.append(Measured(layer.index, "ring of 1 against packed", error, 8 * steps * _unit(torch.float32)))
    return result


def oracle(layer: LayerRecord) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V] and last state [1, HV, V, K] of the serial recurrence, in fp64 on the CPU."""
    mixed_qkv, a, b = (x.cpu().unsqueeze(0) for x in (layer.mixed_qkv, layer.a, layer.b))
    gates = (layer.A_log.cpu(), layer.dt_bias.cpu(), layer.scale)
    out, state = serial(mixed_qkv, a, b, *gates, layer.state.cpu(), **layer.options)
    return out[0], state


def run_packed(layer: LayerRecord, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V] and last state of packed decode with a state of `dtype`."""
    state = layer.state.to(dtype, copy=True)
    out, slots, _ = _buffers(layer)
    for t, (mixed_qkv, a, b) in enumerate(layer.steps):
        ops.fused_recurrent_linear_packed_decode(
            mixed_qkv, a, b, layer.A_log, layer.dt_bias, layer.scale, state, out[t], slots, **layer.options
        )
    return out[:, 0, 0], state


def run_replay(layer: LayerRecord, dtype: torch.dtype, ring_len: int) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V] and last state, flushed, of replay decode. The ring starts as NaN: no dead row may count."""
    state = layer.state.to(dtype, copy=True)
    out, slots, cursor = _buffers(layer)
    arrays = layer.spec.ring_arrays(ring_len, 1, str(out.dtype).removeprefix("torch."))
    d, k, g = (
        torch.full(array.shape, float("nan"), dtype=getattr(torch, array.dtype), device=state.device)
        for array in arrays
    )
    gates = (layer.A_log, layer.dt_bias, layer.scale)
    for t, (mixed_qkv, a, b) in enumerate(layer.steps):
        ops.fused_recurrent_linear_replayssm_decode(
            mixed_qkv, a, b, *gates, state, d, k, g, out[t], slots, cursor, **layer.options
        )
        ops.advance_cursors(cursor, slots, ring_len)
    ops.flush(state, d, k, g, slots, cursor)
    return out[:, 0, 0], state


def relative_error(x: Tensor, true: Tensor) -> float:
    """‖x − true‖ / ‖true‖ over all elements, in fp64."""
    x, true = x.double().cpu(), true.double().cpu()
    return float((x - true).norm() / true.norm())


def print_report(args: argparse.Namespace, measured: list[Measured], dtype: str, ring_len: int, tokens: int) -> None:
    """A row per layer for the state dtype in force, then the state's drift for each dtype, worst layer."""
    columns = [f"{dtype} {route} {part}" for part in ("output", "state") for route in ("packed", "replay")]
    columns.append("ring of 1 against packed")
    by_layer = {(m.layer, m.what): m for m in measured}
    layers = sorted({m.layer for m in measured})
    rows = [(str(i), *(f"{by_layer[i, c].error:.1e}" for c in columns)) for i in layers]
    worst = [max((by_layer[i, c] for i in layers), key=_severity) for c in columns]
    if args.layers == "worst":
        rows = []
    rows.append(("worst", *(f"{m.error:.1e}" for m in worst)))
    rows.append(("limit", *(f"{m.limit:.1e}" for m in worst)))
    print(f"relative error after {tokens} steps, state {dtype}, ring of {ring_len}, model {args.dtype}\n")
    print_table(("layer", "out packed", "out replay", "state packed", "state replay", "L=1 to packed"), rows)
    print("\ndrift: relative error of the state, worst layer\n")
    drift = []
    for name in STATE_DTYPES:
        both = [max((by_layer[i, f"{name} {r} state"] for i in layers), key=_severity) for r in ("packed", "replay")]
        drift.append((name, *(f"{m.error:.1e}" for m in both), *(f"{m.limit:.1e}" for m in both)))
    print_table(("state", "packed", "replay", "limit packed", "limit replay"), drift)
    print()


def _severity(m: Measured) -> float:
    return m.error if m.error == m.error else float("inf")


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _buffers(layer: LayerRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [T, 1, 1, HV, V] in the activation dtype, slots [1], cursor [1]."""
    mixed_qkv = layer.steps[0][0]
    spec = layer.spec
    out = mixed_qkv.new_empty(len(layer.steps), 1, 1, spec.num_v_heads, spec.head_v_dim)
    slots = torch.zeros(1, dtype=torch.int32, device=mixed_qkv.device)
    return out, slots, torch.zeros_like(slots)
