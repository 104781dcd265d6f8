#!/usr/bin/env python3
"""Train the small hybrid language model shipped in ``assets/gdn`` on the data of ``prepare_data.py``.

The model is a ``qwen3_5_text`` of transformers: three gated-delta-rule layers to each layer of full attention. It is
meant for tests and demonstrations of decoding, so it is small enough to live in the repository and real enough to
write legible English. The corpus has about two million tokens and is read many times over: dropout on the embedding and
on every residual branch, weight decay and a fresh order with a random offset in every pass keep the model from learning
it by heart, and the weights with the lowest loss on the ``valid`` part are the ones that are saved.

One GPU needs a few minutes: bf16 autocast over fp32 weights, a chunked gated delta rule in plain PyTorch, and the whole
step replayed as a CUDA graph. A CPU is enough to try the script out, with transformers' own delta rule::

    python scripts/train_model.py --data build/data --out build/gdn
    python scripts/train_model.py --data build/data --out build/try --device cpu --steps 5 --tokens-per-step 2048

The output folder can be loaded with ``AutoModelForCausalLM`` and ``AutoTokenizer``. Weights are stored in bf16, the
decay parameters ``A_log`` and ``dt_bias`` in fp32. ``training.json`` beside them records settings, times and losses.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

KEEP_FP32 = ("A_log", "dt_bias")


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
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
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
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, qwen.Qwen3_5GatedDeltaNet):
                step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())
    return model


ARCHITECTURES: dict[str, Callable[[int, int], PreTrainedModel]] = {"gdn": build_gdn}
BRANCHES = ("linear_attn", "self_attn", "mlp", "embed_tokens")


def add_dropout(model: nn.Module, rate: float) -> None:
    """Drop elements of the embedding and of every residual branch with probability ``rate`` while training."""

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate, module.training), *output[1:])
        return F.dropout(output, rate, module.training)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in BRANCHES:
            module.register_forward_hook(hook)


def conv_by_shifts(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Causal depthwise convolution as a sum of shifted products, which torch.compile can fuse.

    ``hidden_states`` is [batch, channels, time] and ``weight`` [channels, width]; products are taken in fp32.
    """
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states.float(), (width - 1, 0))
    out: Any = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(width))
    if bias is not None:
        out = out + bias[:, None]
    if activation is not None:
        out = ACT2FN[activation](out)
    result: Tensor = out.to(hidden_states.dtype)
    return result


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A, [batch, n, n] with n a power of two.

    Diagonal blocks of doubling size are inverted together: inv([[P, 0], [C, R]]) has -inv(R) C inv(P) below.
    """

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        """Return the inverse, itself unit lower triangular."""
        n = strict.shape[-1]
        inverse = torch.eye(n, dtype=strict.dtype, device=strict.device).repeat(strict.shape[0], 1, 1)
        half = 1
        while half < n:
            shape = (-1, n // (2 * half), 2 * half, n // (2 * half), 2 * half)
            given, blocks = (x.view(shape).diagonal(0, 1, 3).movedim(-1, 1) for x in (strict, inverse))
            below = blocks[..., half:, half:] @ given[..., half:, :half] @ blocks[..., :half, :half]
            blocks[..., half:, :half] = -below
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Differential of an inverse: dX = -X dA X."""
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT)


class StateScan(torch.autograd.Function):
    """States before each chunk for S[i+1] = M[i] S[i] + N[i], S[0] = 0; M is [rows, chunks, K, K], N [.., K, V]."""

    @staticmethod
    def forward(ctx: Any, move: Tensor, add: Tensor) -> Tensor:
        """Return S[0] ... S[chunks - 1] as [rows, chunks, K, V]."""
        states = torch.empty_like(add)
        states[:, 0] = 0
        for i in range(add.shape[1] - 1):
            torch.baddbmm(add[:, i], move[:, i], states[:, i], out=states[:, i + 1])
        ctx.save_for_backward(move, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Run the adjoint recurrence from the last chunk to the first."""
        move, states = ctx.saved_tensors
        adjoint = torch.empty_like(states)  # of the state after each chunk
        adjoint[:, -1] = 0
        for i in range(states.shape[1] - 1, 0, -1):
            torch.baddbmm(grads[0][:, i], move[:, i].mT, adjoint[:, i], out=adjoint[:, i - 1])
        return adjoint @ states.mT, adjoint


def chunk_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Gated delta rule from a zero state, in fp32 and in chunks of 64 tokens, fast enough to train with.

    Queries and keys are [batch, time, key heads, K] and are normalised here; values are [batch, time, value heads, V];
    ``g``, the logarithm of the decay, and ``beta`` are [batch, time, value heads]. Within a chunk the rule is a
    triangular system; from chunk to chunk the state S [K, V] moves by one affine map, S <- M S + N, so that only one
    matrix product a chunk is sequential. Called in place of the function of the same purpose in transformers.
    """
    with torch.autocast(query.device.type, enabled=False):
        dtype, (batch, time_, value_heads, value_dim) = query.dtype, value.shape
        chunk = 64
        pad = -time_ % chunk
        query, key = (
            F.normalize(x.float(), dim=-1).repeat_interleave(value_heads // x.shape[2], 2) for x in (query, key)
        )
        query = query * query.shape[-1] ** -0.5

        def cut(x: Tensor) -> Tensor:
            x = F.pad(x.float().transpose(1, 2), (0, 0, 0, pad))
            return x.reshape(batch * value_heads, -1, chunk, x.shape[-1])

        query, key, value, g, beta = (cut(x) for x in (query, key, value, g[..., None], beta[..., None]))
        total = g.cumsum(2)
        later = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
        decay = (total - total.mT).masked_fill(later, -torch.inf).exp()
        weighted = key * beta
        inverse = UnitLowerInverse.apply(((weighted @ key.mT) * decay).tril(-1).flatten(0, 1)).view_as(decay)
        new, read = inverse @ (value * beta), inverse @ (weighted * total.exp())
        last = total[:, :, -1:]
        to_end = (key * (last - total).exp()).mT
        identity = torch.eye(key.shape[-1], device=key.device)
        states = StateScan.apply(last.exp() * identity - to_end @ read, to_end @ new)
        out = (query * total.exp()) @ states + ((query @ key.mT) * decay) @ (new - read @ states)
        out = out.reshape(batch, value_heads, -1, value_dim)[:, :, :time_].transpose(1, 2).to(dtype)
    return out, None


def batches(
    tokens: np.ndarray, eos: int, per_step: int, lengths: list[int], rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [rows, length] for ever; each pass has a new document order, offset and row lengths.

    Every batch holds ``per_step`` tokens in rows of one of ``lengths``, drawn at random; rows run across documents.
    """
    ends = np.flatnonzero(tokens == eos) + 1
    documents = np.split(tokens.astype(np.int64), ends[:-1])
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        stream = np.roll(stream, -int(rng.integers(len(stream))))
        for start in range(0, len(stream) - per_step, per_step):
            part = torch.from_numpy(stream[start : start + per_step + 1])
            length = int(rng.choice(lengths))
            yield part[:-1].view(-1, length), part[1:].view(-1, length)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, tokens: np.ndarray, length: int, autocast: Callable[[], Any]) -> float:
    """Mean negative log-likelihood in nats per token over consecutive windows of ``length`` tokens."""
    model.eval()
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, length):
        part = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)).to(device)
        with autocast():
            logits = logits_of(model, part[None, :-1])
        total += float(F.cross_entropy(logits[0].float(), part[1:], reduction="sum"))
        count += len(part) - 1
    model.train()
    return total / count


def shipped_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copy the weights to the CPU in their stored types: bf16, but fp32 for the decay; tied weights appear once."""
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    return {
        name: value.detach().cpu().float() if name.endswith(KEEP_FP32) else value.detach().cpu().bfloat16()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def save(model: PreTrainedModel, weights: dict[str, Tensor], tokenizer: Path, out: Path) -> None:
    """Write weights, configuration and tokenizer to ``out`` in the format of transformers."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(out)
    eos = model.config.eos_token_id
    GenerationConfig(eos_token_id=eos, pad_token_id=eos).save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [rows, length, vocabulary] of plain causal rows; masks are passed as absent, so that none is built."""
    logits: Tensor = model(
        input_ids=ids, attention_mask={"full_attention": None, "linear_attention": None}, use_cache=False
    ).logits
    return logits


def speed_up_for_gpu() -> None:
    """Use the delta rule above, and let torch.compile merge the element-wise work of convolution, norms and MLP."""
    qwen.torch_chunk_gated_delta_rule = chunk_delta_rule
    qwen.causal_conv1d_fn = torch.compile(conv_by_shifts, dynamic=True)
    for module in (qwen.Qwen3_5RMSNorm, qwen.Qwen3_5RMSNormGated, qwen.Qwen3_5MLP):
        module.forward = torch.compile(module.forward, dynamic=True)  # type: ignore[method-assign]
    torch.set_float32_matmul_precision("high")


class GraphedStep:
    """A training step recorded once as a CUDA graph for each shape of batch, since its many kernels are short.

    The first call for a shape runs the step twice with a learning rate of zero before it records.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Wrap ``step``, which must do everything on the device, from inputs and targets to the updated weights."""
        self.step, self.optimizer = step, optimizer
        self.recorded: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}

    def record(self, inputs: Tensor, targets: Tensor) -> None:
        """Warm up on a side stream and capture."""
        rates = [group["lr"].clone() for group in self.optimizer.param_groups]
        inputs, targets = inputs.clone(), targets.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for group in self.optimizer.param_groups:
                group["lr"].zero_()
            for _ in range(2):
                self.step(inputs, targets)
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"].copy_(rate)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(inputs, targets)
        self.recorded[inputs.shape] = graph, inputs, targets, loss

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Replay the step for this batch and return its loss."""
        if inputs.shape not in self.recorded:
            self.record(inputs, targets)
        graph, held_inputs, held_targets, loss = self.recorded[inputs.shape]
        held_inputs.copy_(inputs)
        held_targets.copy_(targets)
        graph.replay()
        return loss


def optimizer_for(model: nn.Module, peak: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone: not on norms, convolutions and the parameters of the decay."""
    # one rate tensor a group: its value can change between replays of a graph
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(peak, device=matrices[0].device),
        betas=(0.9, 0.95),
        fused=matrices[0].is_cuda,
        capturable=matrices[0].is_cuda,
    )


def main() -> None:
    """Train, validate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="folder written by prepare_data.py")
    parser.add_argument("--out", type=Path, default=Path("build/gdn"), help="output folder (default: %(default)s)")
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="gdn", help="model family")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2600, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=16384, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 1024, 2048, 4096], help="row lengths to draw from, in tokens"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=200, help="steps of linear warm-up (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=1.0, help="for matrices (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.25, help="probability (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (default: %(default)s)")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between validations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, order and dropout")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device(args.device)
    train, valid = np.load(args.data / "train.npy"), np.load(args.data / "valid.npy")
    tokenizer = json.loads((args.data / "tokenizer/tokenizer.json").read_text())
    eos = next(entry["id"] for entry in tokenizer["added_tokens"] if entry["content"] == "<|endoftext|>")
    lengths = [length for length in args.lengths if args.tokens_per_step % length == 0]
    if not lengths:
        raise SystemExit("--tokens-per-step must be a multiple of one of --lengths")

    qwen.causal_conv1d_fn = conv_by_shifts
    vocab_size = len(tokenizer["model"]["vocab"])
    model = ARCHITECTURES[args.arch](vocab_size, eos).to(device).train()  # type: ignore[arg-type]
    add_dropout(model, args.dropout)
    if device.type == "cuda":
        speed_up_for_gpu()
    optimizer = optimizer_for(model, args.lr, args.weight_decay)
    size = sum(p.numel() for p in model.parameters())
    passes = args.steps * args.tokens_per_step / len(train)
    print(f"{size:,} parameters, {len(train):,} training tokens, {passes:.1f} passes", flush=True)

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def update(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            logits = logits_of(model, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        return loss.detach()

    def rate(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))

    record: dict[str, Any] = {
        "settings": {key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        "parameters": size,
        "passes": passes,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "history": [],
    }
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)

    best, running, started = math.inf, torch.zeros((), device=device), time.perf_counter()
    train_step = GraphedStep(update, optimizer) if device.type == "cuda" else update
    source = batches(train, eos, args.tokens_per_step, lengths, rng)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"].fill_(args.lr * rate(step))
        inputs, targets = next(source)
        running += train_step(inputs.to(device), targets.to(device))
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            interval = (step % args.eval_every) + 1
            row = {
                "step": step + 1,
                "train_loss": float(running) / interval,
                "valid_loss": mean_loss(model, valid, 4096, autocast),
                "seconds": round(time.perf_counter() - started, 1),
            }
            running.zero_()
            record["history"].append(row)
            kept = row["valid_loss"] < best
            if kept:
                best = row["valid_loss"]
                record["kept"] = row
                save(model, shipped_weights(model), args.data / "tokenizer", args.out)
            (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
            print(
                f"step {row['step']:5d}  train {row['train_loss']:.4f}  valid {row['valid_loss']:.4f} nats per token"
                f"  {row['seconds']:.0f} s{'  kept' if kept else ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
