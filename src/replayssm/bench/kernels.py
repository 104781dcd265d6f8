"""What a row of the table runs: packed and replay decode of this package, through the public ops."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from replayssm import ops
from replayssm.bench.case import Case
from replayssm.kernels.policy import Route


class Runner(Protocol):
    """A kernel on the tensors of one case."""

    def step(self, t: int, copy: int) -> None:
        """Step t of the schedule in one copy: the only part that is timed."""

    def settle(self, copy: int) -> None:
        """Make the result of a step the state of the next, for kernels that do not work in place."""

    def output(self, copy: int) -> Tensor:
        """Of the newest step [B, HV, V], by row."""

    def state(self, copy: int) -> Tensor:
        """After the whole schedule, folded [B, HV, V, K], by row."""


class Own:
    """Ours, by either route."""

    def __init__(self, case: Case, route: Route) -> None:
        self.case, self.route = case, route

    def step(self, t: int, copy: int) -> None:
        """See `Runner`."""
        case = self.case
        gates = (*case.token(t, copy), case.A_log, case.dt_bias, None)
        state, out = case.state[copy], case.out[copy]
        if self.route == "packed":
            ops.fused_recurrent_linear_packed_decode(*gates, state, out, case.slots, **case.gate_options)  # type: ignore[arg-type]
            return
        ops.fused_recurrent_linear_replayssm_decode(
            *gates, state, case.d[copy], case.k[copy], case.g[copy], out, case.slots, case.write_pos[t],
            case.force[t], **case.gate_options,  # type: ignore[arg-type]
        )  # fmt: skip

    def settle(self, copy: int) -> None:
        """Works in place."""

    def output(self, copy: int) -> Tensor:
        """See `Runner`."""
        return self.case.out[copy][:, 0]

    def state(self, copy: int) -> Tensor:
        """Flushes first."""
        case = self.case
        if self.route == "replay":
            ops.flush(case.state[copy], case.d[copy], case.k[copy], case.g[copy], case.slots, case.last)
        return case.state[copy][case.slots.long()]
