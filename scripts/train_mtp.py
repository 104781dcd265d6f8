#!/usr/bin/env python3
"""Train an MTP head for a model trained by ``train_model.py --arch gdn``, which stays as it is.

The head (``replayssm.models.mtp``) is one more layer that guesses the token after the next one. It is taught to agree
with the model rather than with the text: its loss is the cross-entropy to the model's own distribution, one position
later, on the training data. The head that is saved is the one that agrees best on the ``valid`` parts.

The head goes to ``mtp.safetensors`` in the model's folder, in bf16 and under the names ``mtp.*`` of Qwen3.5
checkpoints, and the config gets the keys that announce it; ``mtp_training.json`` records settings, times and losses::

    python scripts/train_mtp.py --model build/gdn --data build/data
    python scripts/train_mtp.py --model build/try --data build/data --device cpu --steps 3 --tokens-per-step 2048
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from training import (
    add_common_options,
    add_dropout,
    autocast,
    read_data,
    speed_up_for_gpu,
    stored_weights,
    train,
    use_fast_rules,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from replayssm.models.mtp import MTP_WEIGHTS, PREFIX, MTPHead

CONFIG = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


def new_head(model: PreTrainedModel) -> MTPHead:
    """Return an untrained head in fp32, its matrices drawn as the model's were, its norms the identity."""
    head = MTPHead(model)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, model.config.initializer_range)
    return head


def guesses(model: PreTrainedModel, head: MTPHead, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the head and of the model for the same tokens: those that follow ``targets[:, :-1]``."""
    with torch.no_grad():
        masks = {"full_attention": None, "linear_attention": None}
        hidden = model.model(input_ids=inputs, attention_mask=masks, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, 1:])
    return head.logits(head(hidden[:, :-1], targets[:, :-1])), logits


@torch.no_grad()
def agreement(model: PreTrainedModel, head: MTPHead, tokens: Any, length: int) -> tuple[float, float]:
    """Nats per token of the model's likeliest token, and how often it is the head's likeliest too."""
    device = next(head.parameters()).device
    nats, right, count = 0.0, 0, 0
    for start in range(0, len(tokens) - 2, length):
        part = torch.from_numpy(tokens[start : start + length + 1].astype("int64")).to(device)[None]
        if part.shape[1] < 3:
            break
        with autocast(device):
            mine, theirs = guesses(model, head, part[:, :-1], part[:, 1:])
        wanted = theirs[0].argmax(-1)
        nats += float(F.cross_entropy(mine[0].float(), wanted, reduction="sum"))
        right += int((mine[0].argmax(-1) == wanted).sum())
        count += len(wanted)
    return nats / count, right / count


def main() -> None:
    """Train, validate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/gdn"), help="model folder (default: %(default)s)")
    add_common_options(parser, steps=1200, lr=2e-3, warmup=100, decay=0.1, drop=0.1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    data = read_data(args.data)
    use_fast_rules()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    model.requires_grad_(False)
    head = new_head(model).to(device).train()
    add_dropout(head, args.dropout)
    if device.type == "cuda":
        speed_up_for_gpu(not args.no_compile)
    size = sum(p.numel() for p in head.parameters())
    print(f"MTP head: {size:,} parameters", flush=True)

    record: dict[str, Any] = {
        "settings": {key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        "parameters": size,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "history": [],
    }

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(device):
            mine, theirs = guesses(model, head, inputs, targets)
        return F.cross_entropy(mine.flatten(0, 1).float(), theirs.flatten(0, 1).float().softmax(-1))

    def evaluate() -> dict[str, float]:
        head.eval()
        some = device.type != "cuda"
        prose_loss, prose = agreement(model, head, data.valid[:4097] if some else data.valid, 4096)
        task_loss, task = agreement(model, head, data.task_valid[:2049] if some else data.task_valid, 2048)
        head.train()
        return {"agreement": prose, "task_agreement": task, "choice": prose_loss + task_loss}

    def keep(row: dict[str, Any]) -> None:
        record["kept"] = row
        state = {f"{PREFIX}{name}": value for name, value in head.state_dict().items()}
        save_file(stored_weights(state), args.model / MTP_WEIGHTS, metadata={"format": "pt"})
        config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        (args.model / "config.json").write_text(json.dumps(config | CONFIG, indent=2, sort_keys=True) + "\n")

    def log(row: dict[str, Any]) -> None:
        record["history"].append(row)
        (args.model / "mtp_training.json").write_text(json.dumps(record, indent=2) + "\n")

    train(args, head, loss_of, evaluate, keep, log, data)


if __name__ == "__main__":
    main()
