"""FlashInfer's decode kernels (CuTe DSL): GDN with a float32 or bfloat16 state, KDA with a bfloat16 state."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from replayssm.bench.case import Case, Shape
from replayssm.bench.peers.peer import InPlace, Peer, heads, why_absent, why_not_cuda

GDN = ("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
KDA = ("flashinfer.kda", "recurrent_kda")


class FlashInferGdn(InPlace):
    """A pool of states and slots; a row of `out` is written as it is."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tokens = [
            dict(q=q, k=k, v=v, a=a.unsqueeze(1), b=b.unsqueeze(1))
            for (q, k, v), a, b in zip(heads(case), case.a, case.b, strict=True)
        ]
        self.function = getattr(importlib.import_module(GDN[0]), GDN[1])

    def step(self, t: int, copy: int) -> None:
        """See `Runner`."""
        case = self.case
        self.function(
            **self.tokens[(t + copy) % len(self.tokens)], state=None, A_log=case.A_log, dt_bias=case.dt_bias,
            scale=self.scale, output=case.out[copy], use_qk_l2norm=True, initial_state=case.state[copy],
            initial_state_indices=case.slots,
        )  # fmt: skip


class FlashInferKda(InPlace):
    """Rows as sequences of one token: only that form takes slots in the kernel, the other gathers and scatters."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tokens: list[dict[str, Tensor]] = [
            {name: x.transpose(0, 1) for name, x in dict(q=q, k=k, v=v).items()} | dict(g=a[None], beta=b[None])
            for (q, k, v), a, b in zip(heads(case), case.a, case.b, strict=True)
        ]
        self.ends = torch.arange(case.shape.batch + 1, dtype=torch.int32, device=case.slots.device)
        self.dt_bias = case.dt_bias.flatten()
        self.function = getattr(importlib.import_module(KDA[0]), KDA[1])

    def step(self, t: int, copy: int) -> None:
        """See `Runner`."""
        case = self.case
        self.function(
            **self.tokens[(t + copy) % len(self.tokens)], A_log=case.A_log, dt_bias=self.dt_bias, scale=self.scale,
            initial_state=case.state[copy], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            lower_bound=case.shape.spec.lower_bound, cu_seqlens=self.ends, ssm_state_indices=case.slots,
            output=case.out[copy].transpose(0, 1), beta_is_logit=True,
        )  # fmt: skip


def skip(shape: Shape) -> str | None:
    """See `Peer`."""
    spec = shape.spec
    if (why := why_not_cuda(shape)) is not None:
        return why
    states = ("bfloat16",) if spec.is_kda else ("float32", "bfloat16")
    if shape.state_dtype not in states:
        return f"takes a {spec.kind.upper()} state in {' or '.join(states)} only, not in {shape.state_dtype}"
    if shape.io_dtype != "bfloat16":
        return f"takes activations in bfloat16 only, not in {shape.io_dtype}"
    if (spec.head_k_dim, spec.head_v_dim) != (128, 128):
        return f"takes head dims of 128/128 only, not {spec.head_k_dim}/{spec.head_v_dim}"
    if spec.is_kda and spec.num_k_heads != spec.num_v_heads:
        return "takes a gate for each key head, not for each value head"
    if spec.beta_scale != 1:
        return f"knows no beta scale of {spec.beta_scale}"
    why = why_absent(*(KDA if spec.is_kda else GDN), install="flashinfer-python")
    if why is None and importlib.util.find_spec("cutlass") is None:  # it imports without, and then cannot run
        return "needs nvidia-cutlass-dsl, which is not installed"
    return why


NOTES = ("q, k and v are split before, untimed",)
PEERS = [
    Peer("FlashInfer packed", "packed", skip, FlashInferGdn, NOTES, "gdn"),
    Peer("FlashInfer packed", "packed", skip, FlashInferKda, NOTES, "kda"),
]
