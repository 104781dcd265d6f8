#!/usr/bin/env python3
"""Score a trained model on held-out text in bits per byte, beside byte n-gram models, and let it write samples.

Run after ``prepare_data.py``; the model folder is the output of ``train_model.py`` or one of those in ``assets``::

    python scripts/evaluate_model.py --model assets/gdn --data build/data

The model runs in fp32 with the stored (bf16) weights, on the CPU unless told otherwise. Every held-out chapter stands
alone: the model sees an end-of-text token, then the chapter, and its bits are summed over the tokens of the chapter in
their usual encoding. A chapter longer than the context is read in windows that overlap by half, and each token is
counted once. The n-gram models are trained on the training part of the same data, interpolate all lower orders after
Witten and Bell down to a uniform distribution over 256 bytes, and start every chapter with an empty context as well.

An MTP head in the folder is scored by how often its likeliest token is the model's own likeliest token for the
position, and by the mean overlap of both distributions, the sum over the vocabulary of the smaller probability. The one
is the rate at which greedy decoding would accept one drafted token, the other that of sampling at temperature 1. Both
are measured on the held-out chapters and on what the model itself writes after the first tokens of each.

``--task N`` lets the model solve N problems of the task (``replayssm.study.task``) by greedy decoding of transformers.

A table goes to standard output; all numbers, samples of prose and one solved problem, and the training record go to
``metrics.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers
from training import use_fast_rules
from transformers import AutoModelForCausalLM, AutoTokenizer

from replayssm.models.mtp import MTP_WEIGHTS, MTPHead, has_mtp, load_mtp
from replayssm.study.task import LONGEST, SHORTEST, is_right, problems

Bytes = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.float64]
MAX_ORDER = 8
PROMPTS = ("Genesis 51\n\nAnd it came to pass", "Emma, Chapter 56\n\nMr. Knightley")
DRAWN = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}


def read_documents(path: Path) -> list[dict[str, str]]:
    """Read a file of documents written by ``prepare_data.py``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def grams(texts: list[str], order: int) -> Bytes:
    """For each byte of ``texts``, pack it and the ``order - 1`` bytes before it into one integer, oldest byte highest.

    Zero bytes stand before the start of every text.
    """
    padded = b"".join(b"\0" * MAX_ORDER + text.encode() for text in texts)
    stream = np.frombuffer(padded, dtype=np.uint8).astype(np.uint64)
    packed = np.zeros_like(stream)
    for back in range(order):
        packed[back:] |= stream[: len(stream) - back] << np.uint64(8 * back)
    return packed[stream != 0]


def look_up(keys: Bytes, values: npt.NDArray[np.int64], wanted: Bytes) -> npt.NDArray[np.int64]:
    """Return the value of each wanted key in a table with sorted keys, 0 where it is missing."""
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def ngram_bits(train: list[str], test: list[str], orders: list[int]) -> dict[int, Bits]:
    """Bits for every byte of ``test`` under Witten-Bell models of the given orders, estimated from ``train``.

    With c counts and t(h) the number of different bytes seen after h,
    p(w | h) = (c(h, w) + t(h) p(w | shorter h)) / (c(h) + t(h)).
    """
    probability = np.full(len(grams(test, 1)), 1 / 256)
    bits = {}
    for order in range(1, max(orders) + 1):
        keys, counts = np.unique(grams(train, order), return_counts=True)
        contexts, starts = np.unique(keys >> np.uint64(8), return_index=True)
        totals = np.add.reduceat(counts, starts)
        types = np.diff(np.append(starts, len(keys)))
        wanted = grams(test, order)
        seen = look_up(keys, counts, wanted)
        total, kinds = (look_up(contexts, table, wanted >> np.uint64(8)) for table in (totals, types))
        mixed = (seen + kinds * probability) / np.maximum(total + kinds, 1)
        probability = np.where(total > 0, mixed, probability)
        if order in orders:
            bits[order] = -np.log2(probability)
    return bits


@torch.inference_mode()
def model_bits(model: Any, ids: list[int], context: int) -> float:
    """Bits of ``ids[1:]`` given ``ids[0]``, read in windows of ``context`` tokens that overlap by half."""
    nats, done = 0.0, 1
    while done < len(ids):
        start = 0 if done == 1 else done - context // 2
        window = torch.tensor(ids[start : start + context], device=model.device)
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        losses = F.cross_entropy(logits.double(), window[1:], reduction="none")
        nats += float(losses[done - start - 1 :].sum())
        done = start + len(window)
    return nats / math.log(2)


@torch.inference_mode()
def mtp_rates(model: Any, head: MTPHead, rows: list[list[int]], first: int) -> dict[str, float]:
    """How well the head guesses the model, over the tokens of each row from index ``first`` (at least 2) on."""
    same, overlap, count = 0, 0.0, 0
    for row in rows:
        ids = torch.tensor([row], device=model.device)
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        mine = head.logits(head(hidden[:, :-1], ids[:, 1:-1]))[0, first - 2 :]
        theirs = model.lm_head(hidden[:, 1:])[0, first - 2 :]
        same += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        overlap += float(torch.minimum(mine.softmax(-1), theirs.softmax(-1)).sum())
        count += len(mine)
    return {"tokens": count, "same": same / count, "overlap": overlap / count}


def mtp_acceptance(model: Any, head: MTPHead, chapters: list[list[int]]) -> dict[str, dict[str, float]]:
    """Rates on the chapters, in windows of 1024 tokens, and on continuations of their starts by 128 tokens."""
    windows = [ids[at : at + 1024] for ids in chapters for at in range(0, len(ids) - 2, 1024)]
    rates = {"held-out text": mtp_rates(model, head, [window for window in windows if len(window) > 2], 2)}
    starts = torch.tensor([ids[:32] for ids in chapters if len(ids) >= 32], device=model.device)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for name, options in (("greedy continuation", {"do_sample": False}), ("sampled continuation", drawn)):
        torch.manual_seed(0)
        length = {"max_new_tokens": 128, "min_new_tokens": 128}
        written = model.generate(starts, attention_mask=torch.ones_like(starts), **length, **options)
        rates[name] = mtp_rates(model, head, written.tolist(), starts.shape[1])
    return rates


def task_accuracy(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """Share of ``count`` problems of the test part whose answer is exactly right, and the same for each length."""
    right: dict[int, list[bool]] = {length: [] for length in range(SHORTEST, LONGEST + 1)}
    # long ones together, so that a batch ends at about the same time; end-of-text on the left is masked
    chosen = sorted(problems("test", count), key=lambda problem: (len(problem.numbers), len(problem.prompt)))
    for start in range(0, len(chosen), 125):
        part = chosen[start : start + 125]
        ids = [[tokenizer.eos_token_id, *tokenizer.encode(problem.prompt)] for problem in part]
        inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
        written = model.generate(**inputs, do_sample=False, max_new_tokens=160)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        for problem, text in zip(part, texts, strict=True):
            right[len(problem.numbers)].append(is_right(problem, text))
    every = [result for results in right.values() for result in results]
    return {
        "problems": len(every),
        "right": sum(every),
        "accuracy": sum(every) / len(every),
        "by_length": {str(length): [sum(results), len(results)] for length, results in right.items()},
    }


def samples(model: Any, tokenizer: Any, length: int) -> list[dict[str, Any]]:
    """Continue each prompt by up to ``length`` tokens, greedily and by sampling with seed 0; and solve one problem."""
    sums = tokenizer.eos_token + problems("test", 1, lengths=(5,), limits=(99,))[0].prompt
    results = []
    for prompt, options in [*product(PROMPTS, ({"do_sample": False}, DRAWN)), (sums, {"do_sample": False})]:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        torch.manual_seed(0)
        ids = model.generate(**inputs, **options, max_new_tokens=length)[0]
        results.append({"prompt": prompt, "options": options, "text": tokenizer.decode(ids)})
    return results


def main() -> None:
    """Evaluate, print a table and write ``metrics.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("assets/gdn"), help="model folder (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="folder written by prepare_data.py")
    parser.add_argument("--part", choices=("test", "valid"), default="test", help="held-out part (default: test)")
    parser.add_argument("--orders", type=int, nargs="+", default=[1, 5, 7], help="n-gram orders, 8 at most")
    parser.add_argument("--sample-tokens", type=int, default=160, help="length of samples (default: %(default)s)")
    parser.add_argument("--task", type=int, default=0, help="problems of the task to solve (default: none)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="output file (default: metrics.json in the model folder)")
    args = parser.parse_args()
    if not all(1 <= order <= MAX_ORDER for order in args.orders):
        raise SystemExit(f"--orders must lie between 1 and {MAX_ORDER}")

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = model.to(args.device).eval()
    documents = read_documents(args.data / f"{args.part}.jsonl")
    texts = [document["text"] for document in documents]
    sizes = np.array([len(text.encode()) for text in texts])
    sources = np.array([document["source"] for document in documents])

    tokens = [[tokenizer.eos_token_id, *tokenizer.encode(text)] for text in texts]
    context = model.config.max_position_embeddings
    use_stock_rules = use_fast_rules()
    per_document = {"model": np.array([model_bits(model, ids, context) for ids in tokens])}
    use_stock_rules()
    train = [document["text"] for document in read_documents(args.data / "train.jsonl")]
    for order, each in ngram_bits(train, texts, args.orders).items():
        per_document[f"byte {order}-gram"] = np.add.reduceat(each, np.cumsum(sizes) - sizes)

    masks = {"all": np.ones(len(texts), dtype=bool)}
    masks |= {str(name): sources == name for name in np.unique(sources)}
    table = {
        row: {name: float(bits[mask].sum() / sizes[mask].sum()) for name, mask in masks.items()}
        for row, bits in per_document.items()
    }
    print(f"{'bits per byte, ' + args.part:24s}" + "".join(f"{name:>10s}" for name in masks))
    for row, numbers in table.items():
        print(f"{row:24s}" + "".join(f"{number:10.4f}" for number in numbers.values()))

    metrics: dict[str, Any] = {
        "part": args.part,
        "chapters": len(texts),
        "bytes": int(sizes.sum()),
        "tokens": sum(len(ids) - 1 for ids in tokens),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte": table,
        "weights_sha256": hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if has_mtp(args.model):
        head = load_mtp(args.model, model)
        metrics["mtp"] = {
            "parameters": sum(p.numel() for p in head.parameters()),
            "acceptance": mtp_acceptance(model, head, tokens),
            "weights_sha256": hashlib.sha256((args.model / MTP_WEIGHTS).read_bytes()).hexdigest(),
        }
        for name, rates in metrics["mtp"]["acceptance"].items():
            print(f"MTP, {name:22s}" + "".join(f"  {key} {value:.4f}" for key, value in rates.items()))
    if args.task > 0:
        metrics["task"] = task_accuracy(model, tokenizer, args.task)
        print(f"task: {metrics['task']}")
    target = args.out or args.model / "metrics.json"
    if args.sample_tokens > 0:
        metrics["samples"] = samples(model, tokenizer, args.sample_tokens)
        for sample in metrics["samples"]:
            print(f"\n--- {sample['options']}\n{sample['text']}")
    before = json.loads(target.read_text()) if target.exists() else {}
    for key in ("training", "mtp_training"):
        if (file := args.model / f"{key}.json").exists():
            metrics[key] = json.loads(file.read_text())
        elif key in before:
            metrics[key] = before[key]
    target.write_text(json.dumps(metrics, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
