#!/usr/bin/env python3
"""Score a trained model on held-out text in bits per byte, beside byte n-gram models, and let it write samples.

Run after ``prepare_data.py``; the model folder is the output of ``train_model.py`` or ``assets/gdn``::

    python scripts/evaluate_model.py --model assets/gdn --data build/data

The model runs on the CPU in fp32 with the stored (bf16) weights. Every held-out chapter stands alone: the model sees an
end-of-text token, then the chapter, and its bits are summed over the tokens of the chapter in their usual encoding. A
chapter longer than the context is read in windows that overlap by half, and each token is counted once. The n-gram
models are trained on the training part of the same data, interpolate all lower orders after Witten and Bell down to a
uniform distribution over 256 bytes, and start every chapter with an empty context as well.

A table goes to standard output; all numbers, the samples and the training record go to ``metrics.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

Bytes = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.float64]
MAX_ORDER = 8
PROMPTS = ("Genesis 51\n\nAnd it came to pass", "Emma, Chapter 56\n\nMr. Knightley")


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
        window = torch.tensor(ids[start : start + context])
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        losses = F.cross_entropy(logits.double(), window[1:], reduction="none")
        nats += float(losses[done - start - 1 :].sum())
        done = start + len(window)
    return nats / math.log(2)


def samples(model: Any, tokenizer: Any, length: int) -> list[dict[str, Any]]:
    """Continue each prompt by up to ``length`` tokens, greedily and by sampling with seed 0."""
    drawn = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    results = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        for options in ({"do_sample": False}, drawn):
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
    parser.add_argument("--out", type=Path, help="output file (default: metrics.json in the model folder)")
    args = parser.parse_args()
    if not all(1 <= order <= MAX_ORDER for order in args.orders):
        raise SystemExit(f"--orders must lie between 1 and {MAX_ORDER}")

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    documents = read_documents(args.data / f"{args.part}.jsonl")
    texts = [document["text"] for document in documents]
    sizes = np.array([len(text.encode()) for text in texts])
    sources = np.array([document["source"] for document in documents])

    tokens = [[tokenizer.eos_token_id, *tokenizer.encode(text)] for text in texts]
    context = model.config.max_position_embeddings
    per_document = {"model": np.array([model_bits(model, ids, context) for ids in tokens])}
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
    target = args.out or args.model / "metrics.json"
    if args.sample_tokens > 0:
        metrics["samples"] = samples(model, tokenizer, args.sample_tokens)
        for sample in metrics["samples"]:
            print(f"\n--- {sample['options']}\n{sample['text']}")
    training = args.model / "training.json"
    if training.exists():
        metrics["training"] = json.loads(training.read_text())
    elif target.exists():
        metrics["training"] = json.loads(target.read_text()).get("training")
    target.write_text(json.dumps(metrics, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
