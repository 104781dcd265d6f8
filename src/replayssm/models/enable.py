"""Switch replay decode on for a transformers model, before or after it is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import monkey_patching

from replayssm.errors import UnsupportedModelError
from replayssm.models import families
from replayssm.models.cache import config_state_dtype
from replayssm.models.layers import ADAPTERS, ReplayMixin, check_activation, options_at_build, replay_class
from replayssm.models.options import Mode, ReplayOptions
from replayssm.spec import DEFAULT_RING_LEN, LayerSpec


class Enabled:
    """Returned by `enable`: leaving its `with` block puts the model back as `enable` found it."""

    def __init__(self, model: nn.Module, options: ReplayOptions, layers: list[ReplayMixin]) -> None:
        self.model = model
        self.options = options
        self.specs: tuple[LayerSpec, ...] = tuple(layer.spec() for layer in layers)
        self._before: list[tuple[nn.Module, type[nn.Module], ReplayOptions | None]] = []

    def disable(self) -> None:
        """Undo `enable`. A cache that was filled meanwhile stays valid: its state is flushed when it is read."""
        for layer, cls, options in self._before:
            _set_class(layer, cls)
            if isinstance(layer, ReplayMixin):
                layer.replay = options
        self._before = []

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.disable()


def enable(
    model: nn.Module,
    ring_len: int = DEFAULT_RING_LEN,
    state_dtype: str | torch.dtype | None = None,
    *,
    mode: Mode = "replay",
) -> Enabled:
    """Make every linear-attention layer of `model` decode by replay; `model.generate()` needs nothing else.

    Args:
        model: a transformers model of a family in `replayssm.models.families.FAMILIES`, loaded in any way.
        ring_len: L, decode steps between two writes of the state, 1 … 64.
        state_dtype: float32, bfloat16 or float16 (name or torch dtype). None: environment variable
            `REPLAYSSM_STATE_DTYPE`, else the model config's `mamba_ssm_dtype`, else float32.
        mode: "replay", or "packed" to read and write the state at every step.

    Returns a handle that is also a context manager. Raises `RingLengthError`, `DtypeError`, `OptionError`, or
    `UnsupportedModelError` when the model has no layer that replay knows.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    options = ReplayOptions.resolve(ring_len, state_dtype, mode, config_state_dtype(text) if text else None)
    found = [(layer, type(layer)) for layer in model.modules() if _is_linear_attention(layer)]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear-attention layer that replay knows; "
            f"supported model types: {', '.join(families.FAMILIES)}"
        )
    before = [(layer, cls, getattr(layer, "replay", None)) for layer, cls in found]
    layers = []
    for layer, cls in found:
        if not isinstance(layer, ReplayMixin):
            _set_class(layer, replay_class(cls))
        assert isinstance(layer, ReplayMixin)
        check_activation(layer)
        layer.replay = options
        layers.append(layer)
    enabled = Enabled(model, options, layers)
    enabled._before = before
    return enabled


def disable(model: nn.Module) -> None:
    """Give `model` its stock decode back, whatever enabled it."""
    for layer in model.modules():
        if isinstance(layer, ReplayMixin):
            layer.replay = None


@contextmanager
def patch(
    ring_len: int = DEFAULT_RING_LEN,
    state_dtype: str | torch.dtype | None = None,
    *,
    mode: Mode = "replay",
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
    mapping: dict[str, Any] = {stock.__name__: replay_class(stock) for stock in families.layer_classes(model_type)}
    fresh = [name for name in mapping if name not in monkey_patching.get_patch_mapping()]
    monkey_patching.register_patch_mapping({name: mapping[name] for name in fresh})
    try:
        with options_at_build(options):
            yield
    finally:
        monkey_patching.unregister_patch_mapping(fresh)


def _is_linear_attention(module: nn.Module) -> bool:
    return isinstance(module, ReplayMixin) or type(module).__name__ in ADAPTERS


def _set_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    layer.__class__ = cls
    # Hooks of accelerate (device maps, offload) hold the bound forward of the class they found.
    if "_old_forward" in layer.__dict__:
        layer._old_forward = cls.forward.__get__(layer)
