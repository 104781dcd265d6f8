"""The decode step of each family's linear-attention layer; everything else of the layer stays transformers' own.

A replay layer class is the stock class with `ReplayMixin` in front. Its forward takes over exactly one case: one
token per row that continues a state. Prefill, continuation by several tokens, training and forwards without a cache
go to the stock forward, on a flushed state. The cache layer says which case it is (`takes_step`): by the length of the
input where nothing better is known, by the phase of the step in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from replayssm import ops
from replayssm.errors import CacheStateError, UnsupportedModelError
from replayssm.models.cache import DecodeLayer, adopt
from replayssm.models.families import FAMILIES, layer_classes
from replayssm.models.options import ReplayOptions
from replayssm.spec import LayerSpec


class DecodeInputs(NamedTuple):
    """Projections of one token per row: packed q|k|v [B, C] before the conv, a and b, output gate [B, 1, HV, V]."""

    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    gate: torch.Tensor


class ReplayMixin(nn.Module):
    """Decode by replay. `replay` holds the options; None leaves the layer to transformers."""

    replay: ReplayOptions | None = None
    stock: type[nn.Module]
    layer_idx: int
    activation: str
    conv1d: nn.Conv1d
    conv_kernel_size: int
    merged: torch.Tensor | None = None  # weights of `mergeable` in one, where an engine has put them together

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay = _options_at_build.get()

    def spec(self) -> LayerSpec:
        """Geometry of this layer."""
        raise NotImplementedError

    def project(self, hidden_states: torch.Tensor) -> DecodeInputs:
        """Input projections of [B, 1, D]."""
        raise NotImplementedError

    def mergeable(self) -> list[Any]:
        """Projections of the layer's input that one product can replace, in the order in which `project` needs them."""
        return []

    def inputs(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Results [B, …] of `mergeable` for x [B, D]: views of one product where the weights are merged."""
        layers = self.mergeable()
        if self.merged is None:
            return [layer(x) for layer in layers]
        sizes = [layer.out_features for layer in layers]
        return nn.functional.linear(x, self.merged).split(sizes, -1)

    def gate_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A_log [HV] and dt_bias [HV] (GDN) or [HV, K] (KDA)."""
        raise NotImplementedError

    def output(self, core: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gated norm and output projection of [B, 1, HV, V]."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the stock layer: [B, T, D] in, [B, T, D] out; the cache's state moves T tokens on."""
        if cache_params is None or self.replay is None:
            return super().forward(hidden_states, cache_params, attention_mask, **kwargs)
        layer = adopt(cache_params, self.layer_idx, self.replay)
        if layer.takes_step(hidden_states.shape[1]):
            if attention_mask is not None:
                hidden_states = hidden_states * attention_mask[:, -1:, None].to(hidden_states.dtype)
            return self._decode(hidden_states, layer)
        layer.flush()
        result = super().forward(hidden_states, cache_params, attention_mask, **kwargs)
        # Before decode, so that a compiled step finds them allocated.
        layer.rows(result.shape[0])
        if layer.route(spec := self.spec()) == "replay":
            layer.rings(spec, result.dtype)
        return result

    def _decode(self, hidden_states: torch.Tensor, layer: DecodeLayer) -> torch.Tensor:
        batch, spec = hidden_states.shape[0], self.spec()
        x = self.project(hidden_states)
        A_log, dt_bias = self.gate_parameters()
        if layer.window is not None:
            core = layer.window(x.mixed_qkv, x.a, x.b, A_log, dt_bias, spec, self.conv1d)
            return self.output(core, x.gate)
        checkpoint, slots, cursor = layer.rows(batch)
        conv_state = layer.conv_states[0]
        assert conv_state is not None  # has_previous_state says so
        mixed_qkv = ops.causal_conv_update(
            x.mixed_qkv, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, slots, "silu"
        )
        core = mixed_qkv.new_empty(batch, 1, spec.num_v_heads, spec.head_v_dim)
        scale = spec.head_k_dim**-0.5
        gates = (x.a, x.b, A_log, dt_bias, scale)
        kind: Any = dict(is_kda=spec.is_kda, lower_bound=spec.lower_bound, beta_scale=spec.beta_scale)
        if layer.route(spec) == "packed":
            layer.flush()
            ops.fused_recurrent_linear_packed_decode(mixed_qkv, *gates, checkpoint, core, slots, **kind)
        else:
            assert cursor is not None  # a step with a ring has cursors
            d_cache, k_cache, g_cache = layer.rings(spec, mixed_qkv.dtype)
            ops.fused_recurrent_linear_replayssm_decode(
                mixed_qkv, *gates, checkpoint, d_cache, k_cache, g_cache, core, slots, cursor, layer.force_flush, **kind
            )
            layer.advance()
        if torch.is_grad_enabled():
            sources = (x.mixed_qkv, x.a, x.b, A_log, dt_bias, self.conv1d.weight)
            if wanted := [source for source in sources if source.requires_grad]:
                core = _NoBackward.apply(core, *wanted)
        return self.output(core, x.gate)


class _NoBackward(torch.autograd.Function):
    """Passes `core` on; a backward through it is an error, not a silently missing gradient."""

    @staticmethod
    def forward(ctx: Any, core: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return core.view_as(core)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise CacheStateError(
            "a decode step has no backward; train without a cache (use_cache=False) or after replayssm.disable(model)"
        )


class GatedDeltaNet(ReplayMixin):
    """What the GDN families share: geometry and gates."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    @property
    def beta_scale(self) -> float:
        return 1.0

    def spec(self) -> LayerSpec:
        return LayerSpec(
            "gdn",
            self.num_k_heads,
            self.num_v_heads,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
            beta_scale=self.beta_scale,
        )

    def gate_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.A_log, self.dt_bias


class Qwen35(GatedDeltaNet):
    """qwen3_5, qwen3_5_moe, qwen4_exp: q|k|v, z, b and a each have their own projection."""

    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_a: nn.Module
    in_proj_b: nn.Module
    norm: nn.Module
    out_proj: nn.Module

    def mergeable(self) -> list[nn.Module]:
        return [self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b]

    def project(self, hidden_states: torch.Tensor) -> DecodeInputs:
        mixed_qkv, z, a, b = self.inputs(hidden_states[:, 0])
        return DecodeInputs(mixed_qkv, a, b, z.view(-1, 1, self.num_v_heads, self.head_v_dim))

    def output(self, core: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.norm(core, gate).flatten(2))


class Qwen3Next(Qwen35):
    """qwen3_next: q|k|v|z and b|a are fused, interleaved by key head."""

    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module
    fix_query_key_value_ordering: Callable[..., tuple[torch.Tensor, ...]]

    def mergeable(self) -> list[nn.Module]:
        return []  # they are reordered first

    def project(self, hidden_states: torch.Tensor) -> DecodeInputs:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        mixed_qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        return DecodeInputs(mixed_qkv, a[:, 0], b[:, 0], z)


class OlmoHybrid(GatedDeltaNet):
    """olmo_hybrid: all projections apart; beta may reach 2."""

    allow_neg_eigval: bool
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    a_proj: nn.Module
    b_proj: nn.Module
    g_proj: nn.Module
    o_norm: nn.Module
    o_proj: nn.Module

    @property
    def beta_scale(self) -> float:
        return 2.0 if self.allow_neg_eigval else 1.0

    def mergeable(self) -> list[nn.Module]:
        return [self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj]

    def project(self, hidden_states: torch.Tensor) -> DecodeInputs:
        *qkv, gate, a, b = self.inputs(hidden_states[:, 0])
        return DecodeInputs(joined(qkv), a, b, gate.view(-1, 1, self.num_v_heads, self.head_v_dim))

    def output(self, core: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.o_norm(core, gate).flatten(2))


class KimiDelta(ReplayMixin):
    """kimi_linear and glm5_next: KDA, forget gate and output gate through a low-rank pair of projections."""

    num_heads: int
    head_dim: int
    forget_gate: Any  # a module with A_log, dt_bias and its own projections
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    b_proj: nn.Module
    g_a_proj: nn.Module
    g_b_proj: nn.Module
    o_norm: nn.Module
    o_proj: nn.Module

    @property
    def lower_bound(self) -> float | None:
        return getattr(self.forget_gate, "safe_gate_lower_bound", None)

    def spec(self) -> LayerSpec:
        heads, dim = self.num_heads, self.head_dim
        return LayerSpec("kda", heads, heads, dim, dim, self.conv_kernel_size, lower_bound=self.lower_bound)

    def gate_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate = self.forget_gate
        return gate.A_log.view(-1), gate.dt_bias.view(self.num_heads, self.head_dim)

    def gate_projections(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Projections that make the forget gate and the output gate of x, first to last."""
        return [self.forget_gate.f_a_proj, self.forget_gate.f_b_proj], [self.g_a_proj, self.g_b_proj]

    def mergeable(self) -> list[nn.Module]:
        (forget, *_), (gate, *_) = self.gate_projections()
        return [self.q_proj, self.k_proj, self.v_proj, self.b_proj, forget, gate]

    def project(self, hidden_states: torch.Tensor) -> DecodeInputs:
        *qkv, b, forget, gate = self.inputs(hidden_states[:, 0])
        (_, *of_forget), (_, *of_gate) = self.gate_projections()
        for layer in of_forget:
            forget = layer(forget)
        for layer in of_gate:
            gate = layer(gate)
        heads = (-1, self.num_heads, self.head_dim)
        return DecodeInputs(joined(qkv), forget.view(heads), b, gate.view(heads).unsqueeze(1))

    def output(self, core: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.o_norm(core, gate).flatten(2))


class BailingDelta(KimiDelta):
    """bailing_hybrid: KDA with full-rank gates, bounded where the config says so."""

    g_proj: nn.Module

    @property
    def lower_bound(self) -> float | None:
        return self.forget_gate.lower_bound if self.forget_gate.safe_gate else None

    def gate_projections(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self.forget_gate.f_proj], [self.g_proj]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """q, k and v [B, …] beside each other: a view where they are neighbours in memory already."""
    first, total = parts[0], sum(part.shape[-1] for part in parts)
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != at:
            return torch.cat(list(parts), dim=-1)
        at += part.shape[-1]
    return first.as_strided((first.shape[0], total), (first.stride(0), 1), first.storage_offset())


# Name of the stock layer class -> adapter.
ADAPTERS: dict[str, type[ReplayMixin]] = {
    "Qwen3NextGatedDeltaNet": Qwen3Next,
    "Qwen3_5GatedDeltaNet": Qwen35,
    "Qwen3_5MoeGatedDeltaNet": Qwen35,
    "Qwen4ExpTextGatedDeltaNet": Qwen35,
    "OlmoHybridGatedDeltaNet": OlmoHybrid,
    "KimiLinearDeltaAttention": KimiDelta,
    "Glm5NextTextLinearAttention": KimiDelta,
    "BailingHybridDeltaAttention": BailingDelta,
}


_made: dict[Any, type[ReplayMixin]] = {}


def replay_class(stock: Any) -> type[ReplayMixin]:
    """The replay form of a stock layer class: same parameters, same constructor, a subclass of it."""
    stock = getattr(stock, "stock", stock)
    if stock not in _made:
        adapter = ADAPTERS[stock.__name__]
        body = {"__module__": __name__, "__doc__": adapter.__doc__, "stock": stock}
        _made[stock] = type(f"Replay{stock.__name__}", (adapter, stock), body)
    return _made[stock]


def __getattr__(name: str) -> type[ReplayMixin]:
    # A pickled model names its layer classes by module and name; they are made on demand.
    for stock_name in ADAPTERS:
        if name == f"Replay{stock_name}":
            family = next(key for key, entry in FAMILIES.items() if entry.layer_class == stock_name)
            return replay_class(layer_classes(family)[0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check_activation(layer: Any) -> None:
    """Raise `UnsupportedModelError` when the conv is followed by something else than SiLU."""
    if layer.activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"layer {layer.layer_idx} has conv activation {layer.activation!r}; the decode step supports 'silu'"
        )


_options_at_build: ContextVar[ReplayOptions | None] = ContextVar("options_at_build", default=None)


@contextmanager
def options_at_build(options: ReplayOptions | None) -> Iterator[None]:
    """Layers constructed inside start with these options."""
    token = _options_at_build.set(options)
    try:
        yield
    finally:
        _options_at_build.reset(token)
