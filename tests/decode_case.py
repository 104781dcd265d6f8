"""A linear-attention layer with random weights, its pools and its tokens: the input of the decode tests.

Random numbers are made on the CPU and then moved to the device of the layer, so that every device gets the same.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from replayssm import ops, reference
from replayssm.spec import LayerSpec

NAN = float("nan")


@dataclass
class Tokens:
    """mixed_qkv [T, B, ·], a [T, B, HV(, K)], b [T, B, HV]."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor

    def __getitem__(self, at: object) -> tuple[Tensor, Tensor, Tensor]:
        return self.mixed_qkv[at], self.a[at], self.b[at]  # type: ignore[index]

    def on(self, device: str) -> Tokens:
        """The same tokens on another device."""
        return Tokens(*(x.to(device) for x in self[:]))


@dataclass
class Layer:
    spec: LayerSpec
    ring_len: int = 8
    io: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    l2norm: bool = True
    device: str = "cpu"
    A_log: Tensor = field(init=False)
    dt_bias: Tensor = field(init=False)

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(7)
        hv, k = self.spec.num_v_heads, self.spec.head_k_dim
        self.A_log = (torch.rand(hv, generator=gen) * 2 - 1.5).to(self.device)
        self.dt_bias = (torch.randn((hv, k) if self.spec.is_kda else (hv,), generator=gen) - 1).to(self.device)

    def on(self, device: str) -> Layer:
        """The same layer on another device."""
        other = replace(self, device=device)
        other.A_log, other.dt_bias = self.A_log.to(device), self.dt_bias.to(device)
        return other

    @property
    def gate_args(self) -> dict[str, object]:
        s = self.spec
        return {
            "use_qk_l2norm_in_kernel": self.l2norm,
            "is_kda": s.is_kda,
            "lower_bound": s.lower_bound,
            "beta_scale": s.beta_scale,
        }

    def tokens(self, steps: int, rows: int, seed: int = 0) -> Tokens:
        gen, s = torch.Generator().manual_seed(seed), self.spec
        gate = (s.num_v_heads, s.head_k_dim) if s.is_kda else (s.num_v_heads,)
        return Tokens(
            torch.randn(steps, rows, s.qkv_dim, generator=gen).to(self.io),
            torch.randn(steps, rows, *gate, generator=gen).to(self.io),
            torch.randn(steps, rows, s.num_v_heads, generator=gen).to(self.io),
        ).on(self.device)

    def state(self, rows: int, seed: int = 1) -> Tensor:
        shape = self.spec.state_array(rows).shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.state_dtype)

    def empty_out(self, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        s = self.spec
        return torch.full((rows, 1, s.num_v_heads, s.head_v_dim), NAN, dtype=dtype or self.io, device=self.device)

    def serial(self, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """fp64 oracle, on the CPU: out [T, B, HV, V] and the final state [B, HV, V, K]."""
        mixed, a, b = (x.cpu().transpose(0, 1) for x in tokens[:])
        weights = self.A_log.cpu(), self.dt_bias.cpu()
        out, final = reference.serial(mixed, a, b, *weights, None, state.cpu(), **self.gate_args)
        return out.transpose(0, 1), final


class Pool:
    """State and ring of `slots` slots, filled with `poison` where no slot is placed."""

    def __init__(self, layer: Layer, slots: int, poison: float = NAN) -> None:
        def full(array: object, dtype: torch.dtype) -> Tensor:
            return torch.full(array.shape, poison, dtype=dtype, device=layer.device)  # type: ignore[attr-defined]

        self.layer = layer
        ring = layer.spec.ring_arrays(layer.ring_len, slots)
        self.initial_state = full(layer.spec.state_array(slots), layer.state_dtype)
        self.d_cache, self.g_cache = full(ring.d, torch.float32), full(ring.g, torch.float32)
        self.k_cache = full(ring.k, layer.io)
        self.cursor = torch.zeros(slots, dtype=torch.int32, device=layer.device)

    def on(self, device: str) -> Pool:
        """A copy on another device, or on the same."""
        other = copy(self)
        other.layer = self.layer.on(device)
        for name in ("initial_state", "d_cache", "k_cache", "g_cache", "cursor"):
            setattr(other, name, getattr(self, name).to(device, copy=True))
        return other

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.initial_state, self.d_cache, self.k_cache, self.g_cache

    def place(self, slots: Tensor, state: Tensor) -> None:
        self.initial_state[slots.long()] = state.to(self.initial_state.dtype)

    def step(
        self,
        token: tuple[Tensor, Tensor, Tensor],
        slots: Tensor,
        force: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One replay step with its cursor advance; returns out [B, HV, V]."""
        lay = self.layer
        out = lay.empty_out(len(slots)) if out is None else out
        pos = ops.gather_cursors(self.cursor, slots)
        result = ops.fused_recurrent_linear_replayssm_decode(
            *token, lay.A_log, lay.dt_bias, None, *self.tensors, out, slots, pos, force, **lay.gate_args
        )
        assert result is out
        ops.advance_cursors(self.cursor, slots, lay.ring_len, force)
        return out[:, 0]

    def packed_step(self, token: tuple[Tensor, Tensor, Tensor], slots: Tensor) -> Tensor:
        lay = self.layer
        out = lay.empty_out(len(slots))
        ops.fused_recurrent_linear_packed_decode(
            *token, lay.A_log, lay.dt_bias, None, self.initial_state, out, slots, **lay.gate_args
        )
        return out[:, 0]

    def run(self, tokens: Tokens, slots: Tensor, force: Tensor | None = None) -> Tensor:
        """All tokens; force [T, B]. Returns out [T, B, HV, V]."""
        steps = tokens.mixed_qkv.shape[0]
        return torch.stack([self.step(tokens[t], slots, None if force is None else force[t]) for t in range(steps)])

    def flushed(self, slots: Tensor) -> Tensor:
        """Flush the slots and return their states."""
        ops.flush(*self.tensors, slots, ops.gather_cursors(self.cursor, slots), self.layer.l2norm)
        self.cursor[slots.long()] = 0
        return self.initial_state[slots.long()]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


KINDS = {
    "gdn": {"kind": "gdn"},
    "gdn-beta2": {"kind": "gdn", "beta_scale": 2.0},
    "kda": {"kind": "kda"},
    "kda-bounded": {"kind": "kda", "lower_bound": -5.0},
}


def layer(
    kind: str = "gdn", dims: tuple[int, int, int, int] = (2, 6, 12, 20), ring_len: int = 8, **options: object
) -> Layer:
    """A layer with dims (H, HV, K, V)."""
    h, hv, k, v = dims
    return Layer(
        LayerSpec(num_k_heads=h, num_v_heads=hv, head_k_dim=k, head_v_dim=v, **KINDS[kind]), ring_len, **options
    )  # type: ignore[arg-type]
