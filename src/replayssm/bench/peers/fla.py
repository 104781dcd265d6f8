"""fla-core's fused recurrent delta rules: q, k and v apart, the state read here and written to new memory, in fp32."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from replayssm.bench.case import Case, Shape
from replayssm.bench.peers.peer import Peer, heads, why_absent, why_not_cuda

FUNCTIONS = {
    "gdn": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("fla.ops.kda", "fused_recurrent_kda"),
}


class Fla:
    """Gates, norms and the sigmoid of beta are computed in its kernel, from what ours takes."""

    def __init__(self, case: Case) -> None:
        spec = case.shape.spec
        self.case = case
        # By name: what follows v is three kinds of gate and then beta for GDN, but a gate and beta for KDA.
        self.tokens = [
            dict(q=q, k=k, v=v, g=a.unsqueeze(1), beta=b.unsqueeze(1))
            for (q, k, v), a, b in zip(heads(case), case.a, case.b, strict=True)
        ]
        self.start = [state[case.slots.long()] for state in case.state]
        self.result: list[tuple[Tensor, Tensor] | None] = [None] * case.copies
        self.options: dict[str, Any] = dict(
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=case.A_log,
            dt_bias=case.dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=spec.beta_scale == 2,
            state_v_first=True,
        )  # fmt: skip
        if spec.is_kda:
            self.options["lower_bound"] = spec.lower_bound
        module, name = FUNCTIONS[spec.kind]
        self.function = getattr(importlib.import_module(module), name)

    def step(self, t: int, copy: int) -> None:
        """See `Runner`. Results are kept, so that each copy writes memory of its own."""
        token = self.tokens[(t + copy) % len(self.tokens)]
        self.result[copy] = self.function(**token, initial_state=self.start[copy], **self.options)

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


def skip(shape: Shape) -> str | None:
    """See `Peer`."""
    if (why := why_not_cuda(shape)) is not None:
        return why
    if shape.state_dtype != "float32":
        return f"returns its state in float32 only, not in {shape.state_dtype}"
    if shape.spec.beta_scale not in (1.0, 2.0):
        return f"knows no beta scale of {shape.spec.beta_scale}"
    return why_absent(*FUNCTIONS[shape.spec.kind], install="fla-core")


NOTES = ("writes its state to new memory, not in place", "q, k and v are split before, untimed")
PEERS = [Peer("fla-core recurrent", "packed", skip, Fla, NOTES)]
