"""Is a kernel right at the geometry that is to be timed? Against the serial fp64 recurrence, on a few rows.

Limits as in docs/mathematics.md, section 6: after T steps with n roundings of a stored state,
n·u(state) + 8·T·u(fp32) for the state, u(activations) + 4·(that) for the outputs; Frobenius norm, relative.
A peer that rounds more than its results is allowed its named tolerance on top of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.bench.case import Case, Shape, check_case
from replayssm.bench.kernels import Runner
from replayssm.reference import serial


class Verdict(NamedTuple):
    """Relative errors and their limits."""

    output: float
    output_limit: float
    state: float
    state_limit: float

    @property
    def ok(self) -> bool:
        """Both within their limits; NaN is not."""
        return self.output <= self.output_limit and self.state <= self.state_limit

    def __str__(self) -> str:
        return (
            f"output off by {self.output:.1e} (limit {self.output_limit:.1e}), "
            f"state by {self.state:.1e} (limit {self.state_limit:.1e})"
        )


def check(shape: Shape, route: str, make: Callable[[Case], Runner], tolerance: float = 0.0) -> Verdict:
    """Run the schedule of `check_case` on all rows and compare up to four of them."""
    case = check_case(shape)
    steps = len(case.force)
    rows = sorted({0, min(1, shape.batch - 1), shape.batch // 2, shape.batch - 1})
    want_out, want_state = _oracle(case, rows)
    runner = make(case)
    outs = []
    for t in range(steps):
        runner.step(t, 0)
        outs.append(runner.output(0)[rows].clone())
        runner.settle(0)
    state = runner.state(0)[rows]

    flushes = (case.force != 0) | (case.write_pos == shape.ring_len - 1)
    roundings = steps if route == "packed" else int(flushes.sum(0).max()) + 1
    limit = roundings * _unit(shape.state_dtype) + 8 * steps * _unit("float32")
    out_limit = _unit(shape.io_dtype) + 4 * limit + tolerance
    return Verdict(_error(torch.stack(outs, 1), want_out), out_limit, _error(state, want_state), limit + tolerance)


def _oracle(case: Case, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs [rows, T, HV, V] and the last state [rows, HV, V, K], in fp64 on the CPU."""
    mixed_qkv, a, b = (torch.stack([x[rows].cpu() for x in each], 1) for each in (case.mixed_qkv, case.a, case.b))
    state = case.state[0][case.slots[rows].long()].cpu()
    gates = (case.A_log.cpu(), case.dt_bias.cpu(), None)
    return serial(mixed_qkv, a, b, *gates, state, **case.gate_options)  # type: ignore[arg-type]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm())


def _unit(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps / 2
