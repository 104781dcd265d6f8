"""Switch replay decode on for a transformers model, before or after it is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import monkey_patching

from replayssm.errors import DtypeError, ReplayError, UnsupportedModelError
from replayssm.models import families
from replayssm.models.cache import config_state_dtype
from replayssm.models.layers import ADAPTERS, ReplayMixin, check_activation, options_at_build, replay_class
from replayssm.models.options import Mode, ReplayOptions
from replayssm.spec import DEFAULT_RING_LEN, LayerSpec

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Enabled:
    """Returned by `enable`: `disable()`, or leaving its `with` block, puts the model back as `enable` found it.

    Handles of one model, or of parts of it, may be released in any order; the newest that is left decides.
    """

    def __init__(self, model: nn.Module, options: ReplayOptions, layers: list[nn.Module]) -> None:
        self.model = model
        self.options = options
        self.specs: tuple[LayerSpec, ...] = ()
        self._layers = layers
        self._token = next(_tokens)
        for layer in layers:
            # What each handle that is still open found, oldest first.
            stack = layer.__dict__.setdefault(_STACK, [])
            stack.append((self._token, type(layer), getattr(layer, "replay", None)))
            _switch(layer, replay_class(type(layer)), options)
        try:
            self.specs = tuple(layer.spec() for layer in layers)  # type: ignore[operator]
        except ReplayError:
            self.disable()
            raise

    def disable(self) -> None:
        """Undo `enable`. A cache that was filled meanwhile stays valid: its state is flushed when it is read."""
        for layer in self._layers:
            stack = layer.__dict__.get(_STACK, [])
            at = next((i for i, entry in enumerate(stack) if entry[0] == self._token), None)
            if at is None:
                continue
            _, cls, options = stack.pop(at)
            if at < len(stack):
                stack[at] = (stack[at][0], cls, options)
            else:
                _switch(layer, cls, options)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.disable()


_STACK = "_replay_handles"
_tokens = count()


def enable(
    model: nn.Module,
    ring_len: int = DEFAULT_RING_LEN,
    state_dtype: str | torch.dtype | None = None,
    *,
    mode: Mode = "auto",
) -> Enabled:
    """Make every linear-attention layer of `model` decode by replay; `model.generate()` needs nothing else.

    Args:
        model: a transformers model of a family in `replayssm.models.families.FAMILIES`, loaded in any way, or what
            `replayssm.load_model` returns.
        ring_len: L, decode steps between two writes of the state, 1 … 64.
        state_dtype: float32, bfloat16 or float16 (name or torch dtype). None: environment variable
            `REPLAYSSM_STATE_DTYPE`, else the model config's `mamba_ssm_dtype`, else float32.
        mode: "replay", "packed" to read and write the state at every step, or "auto" for the faster of the two at the
            batch size of each forward (`replayssm.ops.decode_route`; on a CPU always replay).

    Returns a handle that is also a context manager. Raises, with the model left as it was, `RingLengthError`,
    `DtypeError`, `OptionError`, `ShapeError` for a geometry that cannot be served, or `UnsupportedModelError` when the
    model has no layer that replay knows.
    """
    model = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    options = ReplayOptions.resolve(ring_len, state_dtype, mode, config_state_dtype(text) if text else None)
    layers = [layer for layer in model.modules() if _is_linear_attention(layer)]
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear-attention layer that replay knows; "
            f"supported model types: {', '.join(families.FAMILIES)}"
        )
    for layer in layers:
        check_activation(layer)
        conv: Any = layer.conv1d  # never quantized, unlike the projections
        if (dtype := conv.weight.dtype) not in ACTIVATION_DTYPES:
            raise DtypeError.unsupported(f"linear-attention layer {layer.layer_idx}", dtype, ACTIVATION_DTYPES)
    return Enabled(model, options, layers)


def disable(model: nn.Module) -> None:
    """Give `model` its stock layers back, whatever enabled or built it."""
    model = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    for layer in model.modules():
        layer.__dict__.pop(_STACK, None)
        if isinstance(layer, ReplayMixin):
            _switch(layer, layer.stock, None)


@contextmanager
def patch(
    ring_len: int = DEFAULT_RING_LEN,
    state_dtype: str | torch.dtype | None = None,
    *,
    mode: Mode = "auto",
    model_type: str | None = None,
) -> Iterator[None]:
    """Models built inside (`from_pretrained`, `from_config`) get replay layers, through transformers' patch mapping.

    Arguments as in `enable`, except that the model's config is not asked for the state dtype. `model_type` limits
    the patch to one family, which also saves importing the others.
    """
    with patched_classes(ReplayOptions.resolve(ring_len, state_dtype, mode), model_type):
        yield


@contextmanager
def patched_classes(options: ReplayOptions | None, model_type: str | None = None) -> Iterator[None]:
    """As `patch`, with resolved options; None builds replay layers that stay off until `enable`."""
    with _patching:  # the mapping, and the attributes that transformers patches by it, belong to the process
        mapping: dict[str, Any] = {cls.__name__: replay_class(cls) for cls in families.layer_classes(model_type)}
        fresh = [name for name in mapping if name not in monkey_patching.get_patch_mapping()]
        monkey_patching.register_patch_mapping({name: mapping[name] for name in fresh})
        try:
            with options_at_build(options):
                yield
        finally:
            monkey_patching.unregister_patch_mapping(fresh)


_patching = RLock()


def _is_linear_attention(module: nn.Module) -> bool:
    return isinstance(module, ReplayMixin) or type(module).__name__ in ADAPTERS


def _switch(layer: nn.Module, cls: type[nn.Module], options: ReplayOptions | None) -> None:
    layer.__class__ = cls
    layer.__dict__.pop("replay", None)
    if isinstance(layer, ReplayMixin):
        layer.replay = options
    # Hooks of accelerate (device maps, offload) hold the bound forward of the class they found.
    if "_old_forward" in layer.__dict__:
        layer._old_forward = cls.forward.__get__(layer)
