"""SGLang's decode kernels: packed GDN, packed KDA, and replay for both. Argument for argument like ours."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.case import Case, Shape
from replayssm.bench.peers.peer import InPlace, Peer, why_absent, why_not_cuda
from replayssm.spec import Kind

OPS = "sglang.kernels.ops.attention"
PACKED = {
    "gdn": (f"{OPS}.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"),
    "kda": (f"{OPS}.fla.fused_recurrent", "fused_recurrent_kda_packed_decode"),
}
REPLAY = (f"{OPS}.linear.fused_recurrent_linear_replayssm", "fused_recurrent_linear_replayssm_decode")

# Half the spacing of bf16 at 1. Operands rounded to bf16 were seen to put the state off by up to 2.7e-3 and the output
# by 3.2e-3, where an exact kernel is off by 1e-7 and, for the rounding of the output itself, 1.7e-3.
BF16_UNIT = 2.0**-8


class SglangPacked(InPlace):
    """Reads and writes the state in every step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        spec = case.shape.spec
        self.options: dict[str, Any] = dict(A_log=case.A_log, dt_bias=case.dt_bias, scale=self.scale)
        self.a = case.a
        if spec.is_kda:  # takes [B, HV·K]
            self.a = [a.flatten(1) for a in case.a]
            self.options |= dict(dt_bias=case.dt_bias.flatten(), lower_bound=spec.lower_bound)
        module, name = PACKED[spec.kind]
        self.function = getattr(importlib.import_module(module), name)

    def step(self, t: int, copy: int) -> None:
        """See `Runner`."""
        case = self.case
        mixed_qkv, _, b = case.token(t, copy)
        self.function(
            mixed_qkv=mixed_qkv, a=self.a[(t + copy) % len(self.a)], b=b, initial_state=case.state[copy],
            out=case.out[copy], ssm_state_indices=case.slots, use_qk_l2norm_in_kernel=True, **self.options,
        )  # fmt: skip


class SglangReplay(InPlace):
    """Keeps normalised k and d in the dtype of the state, as its pool allocates them, and g in fp32."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        dtype = case.state[0].dtype
        # The same content as in our ring, dead records included, since a timing starts in the middle of one.
        self.d = [d.to(dtype) for d in case.d]
        self.k = [torch.nn.functional.normalize(k.float(), dim=-1).to(dtype) for k in case.k]
        self.g = case.g
        self.function = getattr(importlib.import_module(REPLAY[0]), REPLAY[1])

    def step(self, t: int, copy: int) -> None:
        """See `Runner`."""
        case = self.case
        mixed_qkv, a, b = case.token(t, copy)
        self.function(
            mixed_qkv=mixed_qkv, a=a, b=b, A_log=case.A_log, dt_bias=case.dt_bias, scale=self.scale,
            initial_state=case.state[copy], d_cache=self.d[copy], k_cache=self.k[copy], g_cache=self.g[copy],
            out=case.out[copy], ssm_state_indices=case.slots, write_pos=case.write_pos[t],
            force_flush=case.force[t], use_qk_l2norm_in_kernel=True, is_kda=case.shape.spec.is_kda,
        )  # fmt: skip

    def state(self, copy: int) -> Tensor:
        """Folded here, in fp64: it has no kernel that flushes without a token."""
        case = self.case
        spec, slots = case.shape.spec, case.slots.long()
        live = torch.arange(case.shape.ring_len, device=slots.device) < case.last[:, None]  # [B, L]

        def records(cache: Tensor) -> Tensor:
            """[B, heads, L, ·] in fp64, dead ones zero."""
            content = cache[slots].double()
            content = content.reshape(*content.shape[:3], -1)
            return torch.where(live[:, None, :, None], content, 0.0)

        d, g = records(self.d[copy]), records(self.g[copy])
        k = records(self.k[copy]).repeat_interleave(spec.num_v_heads // spec.num_k_heads, 1)
        total = g.sum(2, keepdim=True)
        weighted = k * torch.exp(total - g.cumsum(2))
        return case.state[copy][slots].double() * torch.exp(total) + d.transpose(-1, -2) @ weighted


def skip(shape: Shape, kernel: tuple[str, str]) -> str | None:
    """See `Peer`."""
    if (why := why_not_cuda(shape)) is not None:
        return why
    if shape.spec.beta_scale != 1:
        return f"knows no beta scale of {shape.spec.beta_scale}"
    return why_absent(*kernel, install="sglang")


def skip_replay(shape: Shape) -> str | None:
    """See `Peer`."""
    if shape.spec.lower_bound is not None:
        return "its replay knows no bounded gate"
    if shape.spec.head_k_dim <= 16:
        return f"its replay takes no key head dim of {shape.spec.head_k_dim}"
    return skip(shape, REPLAY)


def _packed(kind: Kind, notes: tuple[str, ...], tolerance: float = 0.0) -> Peer:
    return Peer("SGLang packed", "packed", partial(skip, kernel=PACKED[kind]), SglangPacked, notes, kind, tolerance)


def _inexact(what: str) -> str:
    return f"rounds {what} to the activations' dtype: its check allows {BF16_UNIT:.1e} more"


PEERS = [
    _packed("gdn", (_inexact("beta"),), BF16_UNIT),
    _packed("kda", ("runs its CUDA kernel where that is built and covers the case, else Triton",)),
    Peer("SGLang replay", "replay", skip_replay, SglangReplay, (_inexact("beta, d and k"),), None, BF16_UNIT),
]
