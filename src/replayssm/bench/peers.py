"""Kernels of other packages, for comparison at equal work. Each is checked like ours before it is timed.

A further peer is one entry in `PEERS`: `skip` says why it cannot run here (one line for people) or None, `make` gives
a `Runner`. Everything that an engine would do once, and not per step, belongs into `make`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from replayssm.bench.case import Case, Shape
from replayssm.bench.kernels import Runner
from replayssm.bench.roofline import Route


@dataclass(frozen=True)
class Peer:
    """A kernel of another package."""

    name: str
    route: Route
    skip: Callable[[Shape], str | None]
    make: Callable[[Case], Runner]
    notes: tuple[str, ...] = ()


class Fla:
    """fla-core's fused recurrent delta rules: q, k and v apart, the state [V, K], read here and written elsewhere."""

    def __init__(self, case: Case) -> None:
        spec, rows = case.shape.spec, case.shape.batch
        h, hv, k_dim, v_dim = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
        self.case = case
        self.tokens = []
        for mixed_qkv, a, b in zip(case.mixed_qkv, case.a, case.b, strict=True):
            q, k, v = mixed_qkv.split([h * k_dim, h * k_dim, hv * v_dim], -1)
            heads = [x.reshape(rows, 1, -1, dim).contiguous() for x, dim in ((q, k_dim), (k, k_dim), (v, v_dim))]
            self.tokens.append((*heads, a.unsqueeze(1).contiguous(), b.unsqueeze(1).contiguous()))
        self.start = [state[case.slots.long()] for state in case.state]
        self.result: list[tuple[Tensor, Tensor] | None] = [None] * case.copies
        self.options: dict[str, Any] = dict(
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=case.A_log,
            dt_bias=case.dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=spec.beta_scale == 2,
            state_v_first=True,
        )  # fmt: skip
        if spec.is_kda:
            from fla.ops.kda import fused_recurrent_kda as function

            self.options["lower_bound"] = spec.lower_bound
        else:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function
        self.function = function

    def step(self, t: int, copy: int) -> None:
        """See `Runner`. Results are kept, so that each copy writes memory of its own."""
        q, k, v, g, beta = self.tokens[(t + copy) % len(self.tokens)]
        self.result[copy] = self.function(q, k, v, g, beta, initial_state=self.start[copy], **self.options)

    def settle(self, copy: int) -> None:
        """See `Runner`."""
        self.start[copy] = self._result(copy)[1]

    def output(self, copy: int) -> Tensor:
        """See `Runner`."""
        return self._result(copy)[0][:, 0]

    def state(self, copy: int) -> Tensor:
        """See `Runner`."""
        return self._result(copy)[1]

    def _result(self, copy: int) -> tuple[Tensor, Tensor]:
        result = self.result[copy]
        assert result is not None
        return result


def _skip_fla(shape: Shape) -> str | None:
    if shape.device.type != "cuda":
        return f"runs on CUDA only, not on {shape.device.type}"
    if importlib.util.find_spec("fla") is None:
        return "not installed; pip install fla-core"
    if shape.state_dtype != "float32":
        return f"returns its state in float32 only, not in {shape.state_dtype}"
    if shape.spec.beta_scale not in (1.0, 2.0):
        return f"knows no beta scale of {shape.spec.beta_scale}"
    return None


PEERS: list[Peer] = [
    Peer("fla-core recurrent", "packed", _skip_fla, Fla, ("writes its state to new memory, not in place",)),
]
