"""Dimensions of known checkpoints, for models with random weights. Needs no torch.

Sizes are those of each checkpoint's config.json (text model): with them a model has exactly the parameters that the
planner's table counts, the pattern of Kimi's layers apart, see there. Numbers that change no cost (rope, eps) are
transformers' defaults unless named.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from replayssm.errors import OptionError

_ROPE = dict(
    rope_type="default", rope_theta=10_000_000, partial_rotary_factor=0.25, mrope_interleaved=True,
    mrope_section=[11, 11, 10],
)  # fmt: skip
_QWEN = dict(
    vocab_size=248320, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, max_position_embeddings=262144, rope_parameters=_ROPE,
)  # fmt: skip


def _period(layers: int) -> list[str]:
    """Every fourth layer is attention, as in all Qwen3.5."""
    return ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": dict(
        **_QWEN, model_type="qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16, tie_word_embeddings=True,
        layer_types=_period(24),
    ),
    "Qwen3.5-4B": dict(
        **_QWEN, model_type="qwen3_5_text", hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, linear_num_value_heads=32, tie_word_embeddings=True,
        layer_types=_period(32),
    ),
    "Qwen3.5-35B-A3B": dict(
        **_QWEN, model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
        num_key_value_heads=2, linear_num_value_heads=32, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8, tie_word_embeddings=False,
        layer_types=_period(40),
    ),
    # Attention at layers 4, 8, …, 24 and 27, counted from 1: 7 of 27. transformers' own default has 6.
    "Kimi-Linear-48B-A3B": dict(
        model_type="kimi_linear", vocab_size=163840, hidden_size=2304, intermediate_size=9216,
        moe_intermediate_size=1024, num_hidden_layers=27, num_attention_heads=32, num_key_value_heads=32,
        num_experts=256, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, linear_num_heads=32,
        linear_head_dim=128, linear_conv_kernel_dim=4, max_position_embeddings=1048576, tie_word_embeddings=False,
        layer_types=[
            "full_attention" if i in (4, 8, 12, 16, 20, 24, 27) else "linear_attention" for i in range(1, 28)
        ],
    ),
}  # fmt: skip


def find(name: str) -> tuple[str, dict[str, Any]]:
    """The name as the table spells it, and its fields; case and an 'owner/' before it do not matter.

    Raises `OptionError` with near names.
    """
    wanted = name.strip().lower().rpartition("/")[2]
    names = {key.lower(): key for key in CONFIGS}
    if wanted in names:
        return names[wanted], CONFIGS[names[wanted]]
    near = [names[key] for key in get_close_matches(wanted, names, n=3, cutoff=0.4)] or list(CONFIGS)
    raise OptionError(f"--config {name!r} is no file and no known name; nearest: {', '.join(near)}")
