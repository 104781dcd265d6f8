"""The layers that a config.json describes, read without transformers.

Keys and what stands in for missing ones are those of transformers' config classes; the tests compare both. A key that
a family needs and that has no stand-in must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from replayssm.errors import ModelFilesError, UnsupportedModelError
from replayssm.planner.checkpoints import Attention, Geometry
from replayssm.spec import LayerSpec

Config = Mapping[str, Any]
LINEAR = "linear_attention"
LOWER_BOUND = -5.0  # of the families with a bounded gate

# Their linear layers are Mamba-2, whose state has another shape and another update.
MAMBA2 = ("mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "bamba", "zamba2")


def read_config(config: object, where: str) -> Geometry:
    """Layers of the config of a language model, or of the text part of one that also sees.

    Raises `UnsupportedModelError` (another family, Mamba-2, no linear-attention layer), `ModelFilesError` (no config,
    a key missing or of the wrong kind) and `ShapeError` (heads or dims that cannot be served). `where` names the file.
    """
    if not isinstance(config, Mapping):
        raise ModelFilesError(f"{where} is not a JSON object")
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ModelFilesError(f"{where}: text_config is not a JSON object")
    model_type = text.get("model_type", config.get("model_type"))
    if not isinstance(model_type, str):
        raise ModelFilesError(f"{where} has no model_type; give the config.json of a checkpoint")
    if model_type in MAMBA2:
        raise UnsupportedModelError(
            f"{where}: the linear layers of model type {model_type!r} are Mamba-2; replay knows Gated DeltaNet and "
            "Kimi Delta Attention"
        )
    if model_type not in READERS:
        what = (
            "linear-attention layers that replay does not know" if _names_linear(text) else "no linear-attention layers"
        )
        raise UnsupportedModelError(f"{where}: model type {model_type!r} has {what}; supported: {', '.join(READERS)}")
    return READERS[model_type](_Keys(text, where, model_type))


def state_dtype_of(config: Config) -> str | None:
    """The config's `mamba_ssm_dtype`, of its text part where it has one."""
    text = config.get("text_config") or config
    return text.get("mamba_ssm_dtype") if isinstance(text, Mapping) else None


class _Keys:
    """A config's keys, checked as they are read."""

    def __init__(self, values: Config, where: str, model_type: str) -> None:
        self.values, self.where, self.model_type = values, where, model_type

    def get(self, key: str) -> Any:
        """None where the key is missing or null."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, at least `least`. Without a default the key must be there."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFilesError(f"{self.where} has no {key}, which model type {self.model_type!r} needs")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelFilesError(f"{self.where}: {key} is {value!r}, not a whole number from {least} on")
        return value

    def bound(self, key: str, default: float | None = None) -> float | None:
        """A number or null; `default` where the key is missing."""
        value = self.values.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ModelFilesError(f"{self.where}: {key} is {value!r}, not a number")
        return value

    def inner(self, key: str) -> _Keys:
        """A dict in the config; an empty one where it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ModelFilesError(f"{self.where}: {key} is not a JSON object")
        return _Keys(value or {}, self.where, self.model_type)

    def layers(self, attends: Callable[[int], bool]) -> tuple[str, ...]:
        """`layer_types`, or where it is missing linear layers but for those of which `attends(i)` holds."""
        types = self.get("layer_types")
        if types is None:
            count = self.count("num_hidden_layers")
            types = ["full_attention" if attends(i) else LINEAR for i in range(count)]
        if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
            raise ModelFilesError(f"{self.where}: layer_types is not a list of names")
        if LINEAR not in types:
            raise UnsupportedModelError(
                f"{self.where} lists {len(types)} layers, none of them {LINEAR}; there is nothing to replay"
            )
        return tuple(types)


def _geometry(spec: LayerSpec, types: tuple[str, ...], attention: Attention) -> Geometry:
    return Geometry(spec, types.count(LINEAR), attention)


def _others(types: tuple[str, ...]) -> int:
    return len(types) - types.count(LINEAR)


def _heads(keys: _Keys, types: tuple[str, ...], index: int = 0) -> Attention:
    """Attention that caches keys and values of each KV head."""
    queries = keys.count("num_attention_heads")
    head_dim = keys.get("head_dim")
    dim = keys.count("head_dim") if head_dim is not None else max(1, keys.count("hidden_size") // queries)
    return Attention(_others(types), keys.count("num_key_value_heads", queries), dim, index=index)


def _latent(keys: _Keys, types: tuple[str, ...], index: int = 0) -> Attention:
    """MLA: the compressed keys and values of all heads, and the part of the key that carries the position."""
    latent = keys.count("kv_lora_rank") + keys.count("qk_rope_head_dim", least=0)
    return Attention(_others(types), latent=latent, index=index)


def _every(keys: _Keys, key: str, default: int) -> Callable[[int], bool]:
    step = keys.count(key, default)
    return lambda i: (i + 1) % step == 0


def _qwen(keys: _Keys, index: int = 0) -> Geometry:
    types = keys.layers(_every(keys, "full_attention_interval", 4))
    heads = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
    dims = keys.count("linear_key_head_dim"), keys.count("linear_value_head_dim")
    spec = LayerSpec("gdn", *heads, *dims, keys.count("linear_conv_kernel_dim", 4))
    return _geometry(spec, types, _heads(keys, types, index))


def _qwen4(keys: _Keys) -> Geometry:
    """Its attention layers may select blocks of tokens by an index, for which they cache a key more."""
    indexed = keys.get("indexer_head_dim") is not None
    return _qwen(keys, keys.count("indexer_head_dim") * keys.count("indexer_kv_heads", 1) if indexed else 0)


def _olmo(keys: _Keys) -> Geometry:
    count = keys.count("num_hidden_layers")
    # A model of fewer than four layers still has one that attends, the last.
    types = keys.layers(lambda i: i % 4 == 3 or (count < 4 and i == count - 1))
    heads = keys.count("num_attention_heads")
    h, hv = keys.count("linear_num_key_heads", heads), keys.count("linear_num_value_heads", heads)
    k = keys.count("linear_key_head_dim", int(0.75 * keys.count("hidden_size") / h))
    v = keys.count("linear_value_head_dim", 2 * k)
    negative = keys.get("linear_allow_neg_eigval")
    scale = 1.0 if negative is False else 2.0
    spec = LayerSpec("gdn", h, hv, k, v, keys.count("linear_conv_kernel_dim", 4), beta_scale=scale)
    return _geometry(spec, types, _heads(keys, types))


def _kimi(keys: _Keys) -> Geometry:
    """The checkpoint keeps its linear layers' sizes, and the layers by number from 1 on, in a dict of their own."""
    inner = keys.inner("linear_attn_config")
    full = inner.get("full_attn_layers")
    if full is not None and not isinstance(full, list):
        raise ModelFilesError(f"{keys.where}: full_attn_layers is {full!r}, not a list of layer numbers")
    types = keys.layers(lambda i: i + 1 in full if full is not None else i > 0 and i % 4 == 0)
    return _geometry(_kda(*_kda_sizes(keys, inner), inner.bound("gate_lower_bound")), types, _latent(keys, types))


def _bailing(keys: _Keys) -> Geometry:
    types = keys.layers(_every(keys, "layer_group_size", 6))
    # As stored by transformers head_dim is the rope's, and the linear layers have a key of their own.
    dim = keys.count("linear_head_dim", keys.get("head_dim"))
    heads = keys.count("linear_num_heads", keys.get("num_attention_heads"))
    conv = keys.count("linear_conv_kernel_dim", keys.count("short_conv_kernel_size", 4))
    bound = None if keys.get("kda_safe_gate") is False else keys.bound("kda_lower_bound", LOWER_BOUND)
    return _geometry(_kda(heads, dim, conv, bound), types, _latent(keys, types))


def _glm(keys: _Keys) -> Geometry:
    types = keys.layers(lambda i: i % 4 == 3)
    inner = keys.inner("linear_attn_config")
    bound = inner.bound("gate_lower_bound", keys.bound("linear_lower_bound", LOWER_BOUND))
    if bound is None and inner.values and inner.get("safe_gate") is not False:
        bound = LOWER_BOUND
    index = 2 * keys.count("index_head_dim") + 1  # the indexer caches a key, a gate of the same size and a flag
    return _geometry(_kda(*_kda_sizes(keys, inner), bound), types, _latent(keys, types, index))


def _kda_sizes(keys: _Keys, inner: _Keys) -> tuple[int, int, int]:
    """Heads, their dim and the conv's width; the inner dict is the stronger."""
    return (
        inner.count("num_heads", keys.get("linear_num_heads")),
        inner.count("head_dim", keys.get("linear_head_dim")),
        inner.count("short_conv_kernel_size", keys.count("linear_conv_kernel_dim", 4)),
    )


def _kda(heads: int, dim: int, conv: int, bound: float | None) -> LayerSpec:
    return LayerSpec("kda", heads, heads, dim, dim, conv, lower_bound=bound)


def _names_linear(text: Config) -> bool:
    types = text.get("layer_types")
    return isinstance(types, list) and LINEAR in types


READERS: dict[str, Callable[[_Keys], Geometry]] = {
    "qwen3_next": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_text": _qwen,
    "qwen4_exp": _qwen4,
    "qwen4_exp_text": _qwen4,
    "olmo_hybrid": _olmo,
    "kimi_linear": _kimi,
    "bailing_hybrid": _bailing,
    "glm5_next": _glm,
    "glm5_next_text": _glm,
}
