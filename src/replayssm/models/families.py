"""The model families that replay serves, and what their configs say about the linear-attention layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from replayssm.errors import ModelFilesError, UnsupportedModelError
from replayssm.spec import Kind, LayerSpec


class Family(NamedTuple):
    """Where transformers keeps a family's layer class."""

    module: str
    layer_class: str
    kind: Kind


_QWEN35 = Family("qwen3_5", "Qwen3_5GatedDeltaNet", "gdn")
_QWEN35_MOE = Family("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "gdn")
_QWEN4 = Family("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", "gdn")
_GLM5 = Family("glm5_next", "Glm5NextTextLinearAttention", "kda")

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family("qwen3_next", "Qwen3NextGatedDeltaNet", "gdn"),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "olmo_hybrid": Family("olmo_hybrid", "OlmoHybridGatedDeltaNet", "gdn"),
    "kimi_linear": Family("kimi_linear", "KimiLinearDeltaAttention", "kda"),
    "bailing_hybrid": Family("bailing_hybrid", "BailingHybridDeltaAttention", "kda"),
    "glm5_next": _GLM5,
    "glm5_next_text": _GLM5,
}


def family_of(model_type: str | None) -> Family:
    """The family of a config's `model_type`, or `UnsupportedModelError` naming those that work."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {model_type!r} has no linear-attention layer that replay knows; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def layer_classes(model_type: str | None = None) -> list[type[Any]]:
    """Stock layer classes of one family, or of all whose modules this transformers has."""
    wanted = [family_of(model_type)] if model_type else list(dict.fromkeys(FAMILIES.values()))
    classes = []
    for family in wanted:
        try:
            module = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
        except ModuleNotFoundError:
            if model_type:
                raise
            continue
        found = getattr(module, family.layer_class)
        classes.append(getattr(found, "stock", found))  # while a model is being built, the name may hold our class
    return classes


def layer_specs(config: Any) -> tuple[LayerSpec, ...]:
    """Geometry of each linear-attention layer of a transformers text config, checked.

    Raises `ShapeError` for head counts or head dims that cannot be served, `ModelFilesError` when the config has no
    linear-attention layer.
    """
    kind = family_of(config.model_type).kind
    layer_types = config.layer_types or ()
    count = sum(t == "linear_attention" for t in layer_types)
    if not count:
        raise ModelFilesError(
            f"config of model type {config.model_type!r} lists {len(layer_types)} layers, none of them "
            "linear_attention; there is nothing to replay"
        )
    if count == len(layer_types):
        raise ModelFilesError(
            f"config of model type {config.model_type!r} lists {count} layers, all of them linear_attention; "
            "transformers takes the sequence length from an attention layer, so there must be one"
        )
    if kind == "gdn":
        spec = LayerSpec(
            kind,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            beta_scale=2.0 if getattr(config, "linear_allow_neg_eigval", False) else 1.0,
        )
    else:
        heads, dim = config.linear_num_heads, config.linear_head_dim
        bound = getattr(config, "linear_lower_bound", None)
        if getattr(config, "kda_safe_gate", False):
            bound = config.kda_lower_bound
        spec = LayerSpec(kind, heads, heads, dim, dim, config.linear_conv_kernel_dim, lower_bound=bound)
    return (spec,) * count
