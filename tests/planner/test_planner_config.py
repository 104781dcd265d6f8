"""Configs read without transformers against what transformers and the models part make of them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from replayssm.errors import ModelFilesError, ModelNotFoundError, ShapeError, UnsupportedModelError
from replayssm.models.families import FAMILIES, layer_specs
from replayssm.planner.checkpoints import GEOMETRIES
from replayssm.planner.config import READERS, read_config, state_dtype_of
from replayssm.planner.estimate import KV_BYTES, Settings, layer_bytes
from replayssm.planner.lookup import find
from replayssm.shipped import SHIPPED
from tests.models.tiny import FAMILIES as TINY
from tests.models.tiny import config_of, model_of, prompt

# Checkpoints whose config is the family's default in transformers.
DEFAULTS = {
    "qwen3_next": "Qwen3-Next-80B-A3B", "qwen3_5": "Qwen3.5-9B", "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "olmo_hybrid": "OLMo-Hybrid-7B", "bailing_hybrid": "Ling-3.0-flash", "glm5_next": "GLM-5.3-Flash",
}  # fmt: skip


def as_json(config):
    """What save_pretrained writes, read again."""
    return json.loads(config.to_json_string())


def specs(config):
    return layer_specs(config.get_text_config(decoder=True))


def test_every_family_has_a_reader():
    assert READERS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("whole", [True, False], ids=["to_dict", "as saved"])
@pytest.mark.parametrize("family", TINY)
def test_tiny_models_have_the_same_layers(family, whole):
    config = config_of(family)
    found = read_config(config.to_dict() if whole else as_json(config), "config.json")
    want = specs(config)
    assert (found.spec,) * found.linear_layers == want
    assert found.all_layers == config.get_text_config(decoder=True).num_hidden_layers


@pytest.mark.parametrize(("family", "name"), DEFAULTS.items())
def test_defaults_are_the_checkpoint(family, name):
    found = read_config(AutoConfig.for_model(family).to_dict(), "config.json")
    known = GEOMETRIES[name]
    assert (found.spec, found.linear_layers, found.attention) == (known.spec, known.linear_layers, known.attention)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("layers", [7, 13])
def test_layer_types_that_are_not_spelled_out(family, layers):
    """As in configs of the hub, which name an interval or nothing."""
    flat = config_of(family).get_text_config(decoder=True)
    short = as_json(flat)
    for key in ("layer_types", "mlp_layer_types", "indexer_types", "transformers_version"):
        short.pop(key, None)
    short["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**short)
    assert set(config.layer_types) >= {"linear_attention"}
    found = read_config(short, "config.json")
    assert (found.spec,) * found.linear_layers == specs(config)
    assert found.all_layers == layers


def test_kimi_as_on_the_hub():
    full = [4, 8, 12, 16, 20, 24, 27]
    inner = dict(
        full_attn_layers=full, kda_layers=[i for i in range(1, 28) if i not in full], num_heads=32, head_dim=128,
        short_conv_kernel_size=4,
    )  # fmt: skip
    text = dict(
        model_type="kimi_linear", num_hidden_layers=27, kv_lora_rank=512, qk_rope_head_dim=64, head_dim=72,
        num_attention_heads=32, linear_attn_config=inner,
    )  # fmt: skip
    known = GEOMETRIES["Kimi-Linear-48B-A3B"]
    for config in (text, {"model_type": "kimi_k3", "text_config": text}):
        found = read_config(config, "config.json")
        assert (found.spec, found.linear_layers, found.attention) == (known.spec, known.linear_layers, known.attention)
    inner["gate_lower_bound"] = -5.0
    assert read_config(text, "config.json").spec.lower_bound == -5


def test_glm_as_on_the_hub():
    inner = dict(num_heads=8, head_dim=64, short_conv_kernel_size=3, gate_lower_bound=-4.0)
    flat = dict(
        num_hidden_layers=8, kv_lora_rank=32, q_lora_rank=16, qk_rope_head_dim=0, index_head_dim=16,
        linear_attn_config=inner,
    )  # fmt: skip
    for change in ({}, {"gate_lower_bound": None}):
        inner |= change
        config = AutoConfig.for_model("glm5_next_text", **flat)
        found = read_config({"model_type": "glm5_next", **flat}, "config.json")
        assert (found.spec,) * found.linear_layers == specs(config)


@pytest.mark.parametrize("family", TINY)
def test_kv_is_what_the_cache_of_a_model_holds(family):
    model, tokens = model_of(family), 11
    with torch.no_grad():
        cache = model(prompt(1, tokens), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            held += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
    found = read_config(config_of(family).to_dict(), "config.json")
    settings = Settings(kv_dtype="float32", context=tokens)
    assert found.attention.layers * layer_bytes(found, settings).kv == held
    assert KV_BYTES["float32"] == 4


def good(**changes):
    return {**as_json(config_of("qwen3_5_text")), **changes}


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ([], ModelFilesError, "not a JSON object"),
        ({}, ModelFilesError, "no model_type"),
        ({"model_type": 3}, ModelFilesError, "no model_type"),
        ({"model_type": "qwen3_5", "text_config": [1]}, ModelFilesError, "text_config is not"),
        ({"model_type": "llama"}, UnsupportedModelError, "'llama' has no linear-attention layers"),
        ({"model_type": "x", "layer_types": ["linear_attention"]}, UnsupportedModelError, "replay does not know"),
        ({"model_type": "nemotron_h"}, UnsupportedModelError, "are Mamba-2"),
        (good(layer_types=["full_attention"] * 4), UnsupportedModelError, "none of them linear_attention"),
        (good(layer_types="abc"), ModelFilesError, "layer_types is not a list"),
        (good(linear_num_value_heads=None), ModelFilesError, "no linear_num_value_heads"),
        (good(linear_num_value_heads="6"), ModelFilesError, "linear_num_value_heads is '6'"),
        (good(linear_key_head_dim=True), ModelFilesError, "linear_key_head_dim is True"),
        (good(num_attention_heads=0), ModelFilesError, "num_attention_heads is 0"),
        (good(linear_num_value_heads=7), ShapeError, "2 key heads do not divide 7 value heads"),
        (good(linear_value_head_dim=300), ShapeError, "V = 300 is outside"),
        ({**as_json(config_of("kimi_linear")), "linear_attn_config": 1}, ModelFilesError, "linear_attn_config is not"),
        ({**as_json(config_of("bailing_hybrid")), "kda_lower_bound": "x"}, ModelFilesError, "kda_lower_bound is 'x'"),
    ],
)
def test_bad_configs(config, error, said):
    with pytest.raises(error, match=said):
        read_config(config, "config.json")


def test_the_state_dtype_is_read_from_the_text_part():
    assert state_dtype_of({"text_config": {"mamba_ssm_dtype": "bfloat16"}}) == "bfloat16"
    assert state_dtype_of({"mamba_ssm_dtype": "float16"}) == "float16"
    assert state_dtype_of({}) is None


def test_lookup_of_files_and_folders(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(good()))
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    (tmp_path / "b.safetensors").write_bytes(b"123")
    folder, named = find(str(tmp_path)), find(str(file))
    assert folder.geometry == named.geometry
    assert folder.weights == named.weights == 8
    other = tmp_path / "other.json"
    other.write_text(json.dumps(good()))
    assert find(str(other)).weights is None  # the folder's weights are another model's
    assert find("kda").weights == (SHIPPED["kda"] / "model.safetensors").stat().st_size
    both = [(SHIPPED["gdn"] / name).stat().st_size for name in ("model.safetensors", "mtp.safetensors")]
    assert find("gdn").weights == sum(both)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (None, ModelNotFoundError, "has no config.json"),
        (b"{", ModelFilesError, "is not JSON"),
        (b"\xff\xfe", ModelFilesError, "is not JSON"),
        (b"[]", ModelFilesError, "not a JSON object"),
    ],
)
def test_lookup_of_bad_files(tmp_path, content, error, said):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(error, match=said):
        find(str(tmp_path))


@pytest.mark.parametrize("text", ["", "x" * 5000, "~nobody-here/model", "./nowhere/config.json"])
def test_lookup_of_nothing(text):
    with pytest.raises(ModelNotFoundError, match="nearest: "):
        find(text)


@pytest.mark.parametrize("text", ["nvidia/Nemotron-3-Nano", "Falcon-H1-7B", "Granite-4-H"])
def test_names_of_mamba_models(text):
    with pytest.raises(UnsupportedModelError, match="Mamba-2"):
        find(text)
