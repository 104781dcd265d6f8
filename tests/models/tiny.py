"""Tiny random models of every family, on which replay and stock decoding are compared."""

from __future__ import annotations

import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import PreTrainedModel

VOCAB = 97
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_GDN = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    layer_types=_LAYERS,
    head_dim=16,
)
_MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    decoder_sparse_step=1,
)
_MLA = dict(kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
_KDA = dict(linear_num_heads=3, linear_head_dim=16, linear_conv_kernel_dim=4, layer_types=_LAYERS)
_KDA_MOE = dict(
    num_local_experts=4,
    num_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
)
_INDEXER = dict(
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=512,
    indexer_compress_ratio=4,
    hc_count=2,
    hc_lowrank=8,
)
_GLM = {
    **_COMMON,
    **_MLA,
    **_KDA,
    **_KDA_MOE,
    "num_key_value_heads": 4,
    "linear_lower_bound": -5.0,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 0,
    "index_topk": 512,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "hc_mult": 2,
}
_GLM_VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    out_hidden_size=48,
    projection_intermediate_size=16,
    patch_size=2,
    image_size=8,
)

CONFIGS: dict[str, dict] = {
    "qwen3_next": {**_COMMON, **_GDN, **_MOE},
    "qwen3_5_text": {**_COMMON, **_GDN},
    "qwen3_5_moe_text": {**_COMMON, **_GDN, **_MOE},
    "qwen4_exp_text": {**_COMMON, **_GDN, **_MOE, **_INDEXER},
    "olmo_hybrid": {**_COMMON, **_GDN, "linear_allow_neg_eigval": True},
    "kimi_linear": {**_COMMON, **_MLA, **_KDA, **_KDA_MOE, "num_key_value_heads": 4, "head_dim": 16},
    "bailing_hybrid": {
        **_COMMON,
        **_MLA,
        **_KDA,
        **_KDA_MOE,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
    },
    "glm5_next": {"text_config": _GLM, "vision_config": _GLM_VISION, "tie_word_embeddings": False},
}
FAMILIES = tuple(CONFIGS)


def config_of(family: str, **changes: object):
    return AutoConfig.for_model(family, **{**CONFIGS[family], **changes})


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    """Stock model with random weights, large enough that every layer moves the argmax."""
    torch.manual_seed(11)
    config = config_of(family)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5 if "conv1d" not in name else 0.5)
            elif "A_log" in name:
                parameter.uniform_(-3, 0.5)
            elif "dt_bias" in name:
                parameter.uniform_(-2, 1)
    return model


def prompt(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (rows, length), generator=generator)
