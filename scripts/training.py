"""What the training scripts share: data, schedule, graphed steps, and models in the format of transformers.

On a GPU a step is bf16 autocast over fp32 weights, and all of it, optimizer included, is replayed as a CUDA graph.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from delta_rules import chunk_gdn, chunk_kda, conv_by_shifts
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

KEEP_FP32 = ("A_log", "dt_bias")
BRANCHES = ("linear_attn", "self_attn", "mlp", "embed_tokens")
END_OF_TEXT = "<|endoftext|>"


class Data(NamedTuple):
    """Token ids written by ``prepare_data.py``, and what the tokenizer calls the ends of text and line."""

    train: np.ndarray
    valid: np.ndarray
    task_train: np.ndarray
    task_valid: np.ndarray
    vocab_size: int
    end: int
    newline: int


def read_data(folder: Path) -> Data:
    """Read the arrays and the vocabulary."""
    tokenizer = json.loads((folder / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    arrays = (np.load(folder / f"{name}.npy") for name in ("train", "valid", "task_train", "task_valid"))
    return Data(*arrays, len(vocabulary), vocabulary[END_OF_TEXT], vocabulary["Ċ"])


def documents_of(tokens: np.ndarray, end: int) -> list[np.ndarray]:
    """Cut after every end-of-text token."""
    return np.split(tokens.astype(np.int64), np.flatnonzero(tokens == end)[:-1] + 1)


def batches(
    data: Data, task_share: float, per_step: int, lengths: list[int], rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [rows, length] for ever, from passes over the prose with problems strewn in.

    Each pass has a new document order, offset and row lengths, and the next problems of the task, so many that they
    make up ``task_share`` of its tokens. Every batch holds ``per_step`` tokens in rows of one of ``lengths``, drawn at
    random; rows run across documents.
    """
    prose, problems = documents_of(data.train, data.end), documents_of(data.task_train, data.end)
    mean = len(data.task_train) / len(problems)
    count, used = round(len(data.train) * task_share / (1 - task_share) / mean), 0
    while True:
        documents = prose + [problems[(used + i) % len(problems)] for i in range(count)]
        used += count
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        stream = np.roll(stream, -int(rng.integers(len(stream))))
        for start in range(0, len(stream) - per_step, per_step):
            part = torch.from_numpy(stream[start : start + per_step + 1])
            length = int(rng.choice(lengths))
            yield part[:-1].view(-1, length), part[1:].view(-1, length)


def usable_lengths(args: Namespace) -> list[int]:
    """Row lengths that divide a step."""
    lengths = [length for length in args.lengths if args.tokens_per_step % length == 0]
    if not lengths:
        raise SystemExit("--tokens-per-step must be a multiple of one of --lengths")
    return lengths


def add_common_options(
    parser: ArgumentParser, *, steps: int, lr: float, warmup: int, decay: float, drop: float
) -> None:
    """Options of every training script, with the defaults of this one."""
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="folder written by prepare_data.py")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, help="time limit; the schedule is shortened to end by then, whatever --steps says"
    )
    parser.add_argument("--tokens-per-step", type=int, default=16384, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 1024, 2048, 4096], help="row lengths to draw from, in tokens"
    )
    parser.add_argument("--task-share", type=float, default=0.25, help="of the tokens (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps of linear warm-up (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=decay, help="for matrices (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=drop, help="probability (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (default: %(default)s)")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between validations (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="on a GPU, leave torch.compile out")
    parser.add_argument("--no-graph", action="store_true", help="on a GPU, launch every kernel of a step by itself")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, order and dropout")


class Schedule:
    """Learning rate by step, or by the clock where a time limit would end training sooner."""

    def __init__(self, args: Namespace) -> None:
        """Start the clock."""
        self.args, self.started = args, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    def done(self, step: int) -> float:
        """Share of the training behind us, 1 at the end."""
        by_clock = self.seconds / (60 * self.args.minutes) if self.args.minutes else 0.0
        return min(1.0, max(step / self.args.steps, by_clock))

    def rate(self, step: int, done: float) -> float:
        """Linear warm-up, then a cosine down to 2 % of the peak."""
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
        return self.args.lr * min(1.0, (step + 1) / max(1, self.args.warmup)) * cosine


def add_dropout(model: nn.Module, rate: float) -> None:
    """Drop elements of the embedding and of every residual branch with probability ``rate`` while training."""

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate, module.training), *output[1:])
        return F.dropout(output, rate, module.training)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in BRANCHES:
            module.register_forward_hook(hook)


def use_fast_rules() -> Callable[[], None]:
    """Put the forms of ``delta_rules`` in place of those of transformers; for whole rows without a cache only.

    Returns a function that puts those of transformers back.
    """
    names = {
        (qwen, "torch_chunk_gated_delta_rule"): chunk_gdn,
        (kimi, "chunk_kimi_delta_attention"): chunk_kda,
        (qwen, "causal_conv1d_fn"): conv_by_shifts,
        (kimi, "causal_conv1d_fn"): conv_by_shifts,
    }
    before = {place: getattr(*place) for place in names}

    def put(functions: dict[tuple[Any, str], Any]) -> None:
        for (module, name), function in functions.items():
            setattr(module, name, function)

    put(names)
    return lambda: put(before)


def speed_up_for_gpu(compiled: bool) -> None:
    """Let torch.compile merge the element-wise work of convolution, norms, gates and MLP; products may use TF32."""
    torch.set_float32_matmul_precision("high")
    if not compiled:
        return
    torch._dynamo.config.recompile_limit = 64  # one function serves several widths, types and modes
    qwen.causal_conv1d_fn = kimi.causal_conv1d_fn = torch.compile(conv_by_shifts, dynamic=True)
    for module in (
        *(qwen.Qwen3_5RMSNorm, qwen.Qwen3_5RMSNormGated, qwen.Qwen3_5MLP),
        *(kimi.KimiLinearRMSNorm, kimi.KimiLinearRMSNormGated, kimi.KimiLinearMLP, kimi.KimiLinearForgetGate),
    ):
        module.forward = torch.compile(module.forward, dynamic=True)  # type: ignore[method-assign]


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 on a GPU, nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


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


def train(
    args: Namespace,
    module: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    evaluate: Callable[[], dict[str, float]],
    keep: Callable[[dict[str, Any]], None],
    log: Callable[[dict[str, Any]], None],
    data: Data,
) -> None:
    """Train the parameters of ``module`` to lessen ``loss_of(inputs, targets)``, up to the last step or minute.

    Every ``--eval-every`` steps and at the end, ``evaluate`` returns numbers of which ``choice`` is to be small.
    ``keep`` is called with them whenever it is the smallest so far, ``log`` always.
    """
    device = torch.device(args.device)
    optimizer = optimizer_for(module, args.lr, args.weight_decay)
    parameters = list(module.parameters())

    def update(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, args.clip)
        optimizer.step()
        return loss.detach()

    step_of = GraphedStep(update, optimizer) if device.type == "cuda" and not args.no_graph else update
    rng = np.random.default_rng(args.seed)
    source = batches(data, args.task_share, args.tokens_per_step, usable_lengths(args), rng)
    best, running, since = math.inf, torch.zeros((), device=device), 0
    schedule, step = Schedule(args), 0
    while (done := schedule.done(step)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"].fill_(schedule.rate(step, done))
        inputs, targets = next(source)
        running += step_of(inputs.to(device), targets.to(device))
        step, since = step + 1, since + 1
        if device.type == "cuda" and step % 8 == 0:
            torch.cuda.synchronize()  # or the clock would run ahead of the work
        last = schedule.done(step) >= 1.0
        if step % args.eval_every == 0 or last:
            row: dict[str, Any] = {"step": step, "train_loss": float(running) / since, **evaluate()}
            row["seconds"] = round(schedule.seconds, 1)
            running.zero_()
            since = 0
            row["kept"] = row["choice"] < best
            if row["kept"]:
                best = row["choice"]
                keep(row)
            log(row)
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in row.items() if isinstance(value, float))
            print(f"step {step:5d}  {numbers}{'  kept' if row['kept'] else ''}", flush=True)
            if last:
                return


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [rows, length, vocabulary] of plain causal rows; masks are passed as absent, so that none is built."""
    masks = {"full_attention": None, "linear_attention": None}
    logits: Tensor = model(input_ids=ids, attention_mask=masks, use_cache=False).logits
    return logits


@torch.no_grad()
def mean_loss(model: PreTrainedModel, tokens: np.ndarray, length: int) -> float:
    """Mean negative log-likelihood in nats per token over consecutive windows of ``length`` tokens."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, length):
        part = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)).to(device)
        with autocast(device):
            logits = logits_of(model, part[None, :-1])
        total += float(F.cross_entropy(logits[0].float(), part[1:], reduction="sum"))
        count += len(part) - 1
    return total / count


@torch.no_grad()
def task_scores(model: PreTrainedModel, data: Data, rows: int) -> tuple[float, float]:
    """Nats per token of the solutions, and the share of problems whose whole solution would be written greedily.

    With the true solution as its input, a model puts every token of it first exactly if it would write it so alone.
    """
    device = next(model.parameters()).device
    nats, tokens, right = 0.0, 0, 0
    problems = documents_of(data.task_valid, data.end)
    for start in range(0, len(problems), rows):
        some = problems[start : start + rows]
        ids = np.full((len(some), 1 + max(map(len, some))), data.end)
        asked = np.zeros(ids.shape, dtype=bool)
        for i, problem in enumerate(some):
            ids[i, 1 : 1 + len(problem)] = problem
            asked[i, 2 + int(np.argmax(problem == data.newline)) : 1 + len(problem)] = True
        all_ids, mask = torch.from_numpy(ids).to(device), torch.from_numpy(asked[:, 1:]).to(device)
        with autocast(device):
            logits = logits_of(model, all_ids[:, :-1])
        targets = all_ids[:, 1:]
        losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        nats += float(losses[mask].sum())
        tokens += int(mask.sum())
        right += int(((logits.argmax(-1) == targets) | ~mask).all(1).sum())
    return nats / tokens, right / len(problems)


def stored_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU in the types in which they are stored: bf16, but fp32 for the parameters of the decay."""
    return {
        name: value.detach().cpu().to(torch.float32 if name.endswith(KEEP_FP32) else torch.bfloat16).contiguous()
        for name, value in state.items()
    }


def save_model(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    """Write weights, configuration and tokenizer to ``out`` in the format of transformers; tied weights appear once."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(out)
    eos = model.config.eos_token_id
    GenerationConfig(eos_token_id=eos, pad_token_id=eos).save_pretrained(out)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    state = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(stored_weights(state), out / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
