"""Fewer, larger operations around the linear layers of a model, for decode steps on a GPU.

Projections of the same input become one product, and torch.compile merges the element-wise work of norms, plain MLPs
and rotary embedding. Compiled one by one, these take seconds and serve every layer; the whole model would take minutes
for the same kernels, since the products and our own operations are what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.activations import ACT2FN

from replayssm.engine.compiling import compile_shapes
from replayssm.models.layers import ReplayMixin

COMPILED = ("RMSNorm", "RMSNormGated", "MLP")  # ends of class names
FUNCTIONS = ("apply_rotary_pos_emb",)
Undo = Callable[[], None]


def fuse(model: Any, compiled: bool = True) -> Undo:
    """Change `model` in place. Returns a function that undoes it. Without `compiled`, only products are merged."""
    done: list[Undo] = []
    mlp = compile_shapes(_mlp, dynamic=True) if compiled else _mlp
    kinds: dict[type, Any] = {}
    files = set()
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, ReplayMixin):
            done.append(_merge_inputs(module))
        elif name.endswith(COMPILED) and "forward" not in module.__dict__:
            files.add(sys.modules[type(module).__module__])
            undo = _merge_mlp(module, mlp)
            if undo is None and compiled:
                kind = type(module)
                if kind not in kinds:
                    kinds[kind] = compile_shapes(kind.forward, dynamic=True)
                undo = _set(module, "forward", kinds[kind].__get__(module))
            if undo is not None:
                done.append(undo)
    for file in files if compiled else ():
        for name in FUNCTIONS:
            if hasattr(file, name):
                done.append(_set(file, name, compile_shapes(getattr(file, name), dynamic=True)))

    def undo_all() -> None:
        for undo in reversed(done):
            undo()

    return undo_all


def merge(layers: Sequence[nn.Module]) -> Tensor | None:
    """One weight for several plain projections without bias, whose own weights become views of it. None for others."""
    plain: list[Any] = [layer for layer in layers if isinstance(layer, nn.Linear) and layer.bias is None]
    if any(type(layer) is not nn.Linear for layer in plain):  # a quantized one has another forward
        return None
    alike = {(layer.in_features, layer.weight.dtype, layer.weight.device) for layer in plain}
    if not layers or len(plain) < len(layers) or len(alike) > 1:
        return None
    whole = torch.cat([layer.weight.data for layer in plain])
    for layer, part in zip(plain, whole.split([layer.out_features for layer in plain]), strict=True):
        layer.weight.data = part
    return whole


def _part(layers: Sequence[Any]) -> None:
    """Weights of their own again."""
    for layer in layers:
        layer.weight.data = layer.weight.data.clone()


def _merge_inputs(layer: ReplayMixin) -> Undo:
    layers = layer.mergeable()
    layer.merged = merge(layers)

    def undo() -> None:
        if layer.merged is not None:
            layer.merged = None
            _part(layers)

    return undo


def _merge_mlp(module: Any, compiled: Callable[..., Tensor]) -> Undo | None:
    """Gate and up projection in one product; None for another kind of MLP."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(hasattr(module, name) for name in names) or len(list(module.parameters())) != 3:
        return None
    if type(module.act_fn) is not type(ACT2FN["silu"]) or type(module.down_proj) is not nn.Linear:
        return None
    layers = [module.gate_proj, module.up_proj]
    if (merged := merge(layers)) is None:
        return None
    back = _set(module, "forward", lambda x: compiled(x, merged, module.down_proj.weight))

    def undo() -> None:
        back()
        _part(layers)

    return undo


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear(x, gate_up).chunk(2, -1)
    return linear(silu(gate) * up, down)


def _set(owner: Any, name: str, value: Any) -> Undo:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo
