"""The table of known checkpoints against published sizes and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from replayssm.errors import OptionError
from replayssm.planner.checkpoints import GEOMETRIES, Attention, known, nearest

MIB = 2**20
# fp32 state of one request in MiB, linear and all layers, as published with the checkpoints' configs.
PUBLISHED = {
    "Qwen3.5-0.8B": (18, 18, 24), "Qwen3.5-2B": (18, 18, 24), "Qwen3.5-4B": (48, 24, 32), "Qwen3.5-9B": (48, 24, 32),
    "Qwen3.5-27B": (144, 48, 64), "Qwen3.6-27B": (144, 48, 64), "Qwen3.8-27B": (144, 48, 64),
    "Qwen3.5-35B-A3B": (60, 30, 40), "Qwen3.6-35B-A3B": (60, 30, 40), "Qwen3-Next-80B-A3B": (72, 36, 48),
    "Qwen3.5-122B-A10B": (144, 36, 48), "Qwen3.5-397B-A17B": (180, 45, 60), "Qwen3.8-Flash-Next": (108, 36, 48),
    "OLMo-Hybrid-7B": (50.625, 24, 32), "Kimi-Linear-48B-A3B": (40, 20, 27), "Ling-3.0-flash": (70, 35, 42),
    "GLM-5.3-Flash": (136, 34, 45), "Kimi-K3": (414, 69, 93),
}  # fmt: skip

# What transformers needs to build each text model, over its defaults: sizes of the checkpoint's config.json.
_QWEN35 = dict(num_key_value_heads=2, head_dim=256, vocab_size=248320)
_TIED = {**_QWEN35, "tie_word_embeddings": True}
_SMALL = {**_TIED, "num_hidden_layers": 24, "num_attention_heads": 8, "linear_num_value_heads": 16}
_LARGE = dict(num_attention_heads=32, num_key_value_heads=2, linear_num_value_heads=64)
_MOE = dict(moe_intermediate_size=1024, shared_expert_intermediate_size=1024)
CONFIGS = {
    "Qwen3.5-0.8B": ("qwen3_5_text", {**_SMALL, "hidden_size": 1024, "intermediate_size": 3584}),
    "Qwen3.5-2B": ("qwen3_5_text", {**_SMALL, "hidden_size": 2048, "intermediate_size": 6144}),
    "Qwen3.5-4B": (
        "qwen3_5_text", {**_TIED, "num_key_value_heads": 4, "hidden_size": 2560, "intermediate_size": 9216}
    ),
    "Qwen3.5-9B": ("qwen3_5_text", {}),
    "Qwen3.5-27B": (
        "qwen3_5_text",
        dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
             num_key_value_heads=4, linear_num_value_heads=48),
    ),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {}),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
    "Qwen3.5-122B-A10B": ("qwen3_5_moe_text", {**_LARGE, **_MOE, "hidden_size": 3072, "num_hidden_layers": 48}),
    "Qwen3.5-397B-A17B": (
        "qwen3_5_moe_text",
        {**_LARGE, **_MOE, "hidden_size": 4096, "num_hidden_layers": 60, "num_experts": 512, "num_experts_per_tok": 10},
    ),
    "Qwen3.8-Flash-Next": (
        "qwen4_exp_text",
        dict(hidden_size=2560, num_hidden_layers=48, num_attention_heads=24, moe_intermediate_size=640,
             shared_expert_intermediate_size=640, linear_num_value_heads=48, ple_layer_ids=[2], eos_token_id=248044,
             indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048,
             indexer_compress_ratio=4, rope_parameters=dict(rope_type="default", rope_theta=1e7,
                                                            partial_rotary_factor=0.25)),
    ),
    "OLMo-Hybrid-7B": ("olmo_hybrid", {}),
    "Kimi-Linear-48B-A3B": ("kimi_linear", {}),
    "Ling-3.0-flash": ("bailing_hybrid", {}),
    "GLM-5.3-Flash": ("glm5_next", {}),
}  # fmt: skip


def parameters(model_type, changes):
    """Of the text model, built without storage."""
    config = AutoConfig.for_model(model_type, **changes)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    return sum(p.numel() for name, p in model.named_parameters() if "visual" not in name)


def test_every_checkpoint_has_the_published_state():
    found = {n: (g.state_bytes / MIB, g.linear_layers, g.all_layers) for n, g in GEOMETRIES.items()}
    assert found == PUBLISHED
    assert all(g.attention.values_per_token > 0 for g in GEOMETRIES.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name):
    assert GEOMETRIES[name].parameters == parameters(*CONFIGS[name])


def test_the_other_checkpoints_have_a_twin_or_no_count():
    for name in GEOMETRIES.keys() - CONFIGS.keys():
        twin = name.replace("3.6", "3.5").replace("3.8", "3.5")
        assert GEOMETRIES[name].parameters is None or GEOMETRIES[name] == GEOMETRIES[twin]
    assert [name for name, g in GEOMETRIES.items() if g.weight_bytes is None] == ["Kimi-K3"]


# Cached numbers of a token, all attention layers: published bytes per token of these models, divided by two.
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Qwen3.5-0.8B", 6144), ("Qwen3.8-27B", 32768), ("Kimi-Linear-48B-A3B", 7 * 576), ("Kimi-K3", 24 * 576),
        ("Qwen3.5-122B-A10B", 12 * 1024), ("OLMo-Hybrid-7B", 8 * 60 * 128),
    ],
)  # fmt: skip
def test_kv_of_a_token(name, values):
    attention = GEOMETRIES[name].attention
    assert attention.layers * attention.values_per_token == values


@pytest.mark.parametrize("name", ["qwen3.5-4b", "Qwen/Qwen3.5-4B", " QWEN3.5-4B "])
def test_names_are_found_whatever_their_case_or_owner(name):
    assert known(name) == ("Qwen3.5-4B", GEOMETRIES["Qwen3.5-4B"])


def test_an_unknown_name_has_near_ones():
    assert known("Qwen3.5-4") is None
    assert nearest("Qwen3.5-4")[0] == "Qwen3.5-4B"
    assert nearest("zzz") == list(GEOMETRIES)


def test_shards():
    whole = GEOMETRIES["Qwen3.5-35B-A3B"]
    half, eighth = whole.shard(2), whole.shard(8)
    assert (half.spec.num_k_heads, half.spec.num_v_heads, half.attention.kv_heads) == (8, 16, 1)
    assert (eighth.spec.num_k_heads, eighth.spec.num_v_heads) == (2, 4)
    assert eighth.attention.kv_heads == 1  # repeated
    assert half.state_bytes * 2 == eighth.state_bytes * 8 == whole.state_bytes
    assert whole.shard(1) == whole
    latent = GEOMETRIES["Kimi-Linear-48B-A3B"]
    assert latent.shard(4).attention == latent.attention
    with pytest.raises(OptionError, match="--tp 3 does not divide 16 key heads and 32 value heads"):
        whole.shard(3)
    with pytest.raises(OptionError, match="--tp 6 neither divides 4 KV heads"):
        Attention(8, 4, 256).shard(6)
