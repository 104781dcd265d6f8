#!/usr/bin/env python3
"""Train one of the small hybrid language models shipped in ``assets`` on the data of ``prepare_data.py``.

``--arch gdn`` is a ``qwen3_5_text`` of transformers, ``--arch kda`` a ``kimi_linear`` with plain MLPs: three layers of
gated delta rule or Kimi delta attention to each layer of full attention. The models are meant for tests and
demonstrations of decoding, so they are small enough to live in the repository and real enough to write legible English
and to add up a list of numbers. The prose has about two million tokens and is read many times over: dropout on the
embedding and on every residual branch, weight decay and a fresh order with a random offset in every pass keep the model
from learning it by heart. A quarter of every batch is problems of the task. The weights that are saved are those with
the lowest loss on the ``valid`` parts, prose and solutions added up.

One GPU needs a few minutes: bf16 autocast over fp32 weights, chunked rules in plain PyTorch, and the whole step
replayed as a CUDA graph. A CPU is enough to try the script out::

    python scripts/train_model.py --arch kda --data build/data --out build/kda
    python scripts/train_model.py --data build/data --out build/try --device cpu --steps 3 --tokens-per-step 2048

The output folder can be loaded with ``AutoModelForCausalLM`` and ``AutoTokenizer``. Weights are stored in bf16, the
decay parameters ``A_log`` and ``dt_bias`` in fp32. ``training.json`` beside them records settings, times and losses.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from training import (
    add_common_options,
    add_dropout,
    autocast,
    logits_of,
    mean_loss,
    read_data,
    save_model,
    speed_up_for_gpu,
    task_scores,
    train,
    use_fast_rules,
)
from transformers import PreTrainedModel
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 2


def build_gdn(vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """Return an untrained hybrid of gated-delta-rule and full-attention layers, in fp32.

    transformers draws decay rates from a range in which most heads forget within a few tokens. With few heads that
    leaves little to remember with, so time steps are drawn log-uniformly from 0.001 to 0.1 instead: at the start,
    the time for a state to fall to 1/e ranges from a token to about a thousand.
    """
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    model = qwen.Qwen3_5ForCausalLM(config)
    draw_decay(model, qwen.Qwen3_5GatedDeltaNet)
    return model


def build_kda(vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """Return an untrained hybrid of Kimi-delta-attention and latent-attention layers, in fp32.

    The family has no tied embeddings, and its attention no positions. Its MLPs are mixtures of experts as a rule; here
    all are plain. Decay rates are drawn as in the other model, a time step for each key channel.
    """
    config = KimiLinearConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        mlp_layer_types=["dense"] * len(LAYERS),
        num_local_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        linear_num_heads=3,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    model = kimi.KimiLinearForCausalLM(config)
    draw_decay(model, kimi.KimiLinearForgetGate)
    return model


def draw_decay(model: PreTrainedModel, owner: type[Any]) -> None:
    """Draw rates from 1 to 16 and time steps log-uniformly from 0.001 to 0.1 in every module of type ``owner``."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, owner):
                step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())


ARCHITECTURES: dict[str, Callable[[int, int], PreTrainedModel]] = {"gdn": build_gdn, "kda": build_kda}


def main() -> None:
    """Train, validate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="gdn", help="model family")
    parser.add_argument("--out", type=Path, help="output folder (default: build/ and the family)")
    add_common_options(parser, steps=2800, lr=2e-3, warmup=200, decay=1.0, drop=0.25)
    args = parser.parse_args()
    out: Path = args.out or Path("build") / args.arch
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    data = read_data(args.data)
    use_fast_rules()
    model = ARCHITECTURES[args.arch](data.vocab_size, data.end).to(device).train()  # type: ignore[arg-type]
    add_dropout(model, args.dropout)
    if device.type == "cuda":
        speed_up_for_gpu(not args.no_compile)
    size = sum(p.numel() for p in model.parameters())
    passes = args.steps * args.tokens_per_step * (1 - args.task_share) / len(data.train)
    print(f"{args.arch}: {size:,} parameters, {passes:.1f} passes over {len(data.train):,} tokens of prose", flush=True)

    record: dict[str, Any] = {
        "settings": {key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        "parameters": size,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "history": [],
    }
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(device):
            logits = logits_of(model, inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def evaluate() -> dict[str, float]:
        model.eval()
        # a CPU is for trying out: a few windows and problems are enough there
        some = device.type != "cuda"
        prose = mean_loss(model, data.valid[:4097] if some else data.valid, 4096)
        few = data._replace(task_valid=data.task_valid[:2000]) if some else data
        task, right = task_scores(model, few, 100)
        model.train()
        return {"valid_loss": prose, "task_loss": task, "task_right": right, "choice": prose + task}

    def keep(row: dict[str, Any]) -> None:
        record["kept"] = row
        save_model(model, args.data / "tokenizer", out)

    def log(row: dict[str, Any]) -> None:
        record["history"].append(row)
        # the last minute may have ended it before the last step
        record["passes"] = row["step"] * args.tokens_per_step * (1 - args.task_share) / len(data.train)
        (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")

    train(args, model, loss_of, evaluate, keep, log, data)
    if device.type == "cuda":
        print(f"most memory allocated: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
