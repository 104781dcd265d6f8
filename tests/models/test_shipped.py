"""The shipped models: what their cards promise, equal text by every route, and an MTP head that knows its model."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import replayssm
from replayssm.models.loading import load_model
from replayssm.models.mtp import MTP_WEIGHTS, load_mtp
from replayssm.shipped import HELD_OUT, SHIPPED
from replayssm.spec import LayerSpec
from replayssm.study.accuracy import solve
from replayssm.study.setting import Setting
from replayssm.study.task import problems

COMMON_WORDS = """
the and of to in that he it his for they was with be him i not them is as unto shall said all which her she had my thou
lord a but were from there this so by at have out up who me their no you
"""
PROMPT = "Genesis 51\n\nAnd it came to pass"
MOST_BYTES = 16 * 2**20  # of any file
MODEL_TYPES = {"gdn": "qwen3_5_text", "kda": "kimi_linear"}
LAYERS = {"gdn": [LayerSpec("gdn", 2, 4, 128, 128)] * 6, "kda": [LayerSpec("kda", 3, 3, 128, 128)] * 6}


@pytest.fixture(scope="module", params=SHIPPED)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def loaded(name):
    return load_model(name)


@pytest.fixture(scope="module")
def card(name):
    return (SHIPPED[name] / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def metrics(name):
    return json.loads((SHIPPED[name] / "metrics.json").read_text(encoding="utf-8"))


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_size_and_geometry(name, loaded):
    assert 5e6 <= loaded.model.num_parameters() <= 12e6
    for file in SHIPPED[name].iterdir():
        assert file.stat().st_size < MOST_BYTES
        assert file.stat().st_mode & 0o777 == 0o644
    assert list(loaded.specs) == LAYERS[name]
    assert loaded.config.model_type == MODEL_TYPES[name]


def test_metrics_are_those_of_the_weights(name, loaded, metrics):
    assert digest(SHIPPED[name] / "model.safetensors") == metrics["weights_sha256"]
    assert loaded.model.num_parameters() == metrics["parameters"] == metrics["training"]["parameters"]
    bits = metrics["bits_per_byte"]
    assert bits["model"]["all"] < bits["byte 5-gram"]["all"] < bits["byte 1-gram"]["all"]
    has_head = (SHIPPED[name] / MTP_WEIGHTS).exists()
    assert has_head == ("mtp" in metrics) == ("mtp_training" in metrics)
    if has_head:
        assert digest(SHIPPED[name] / MTP_WEIGHTS) == metrics["mtp"]["weights_sha256"]


def test_the_card_shows_the_metrics(name, card, metrics):
    names = {"model": "**this model**", "byte 1-gram": "byte 1-gram", "byte 5-gram": "byte 5-gram", "byte 7-gram": ""}
    best = min((row for row in metrics["bits_per_byte"] if row != "model"), key=lambda row: bits_of(metrics, row)[0])
    for row in {**names, best: best}:
        numbers = " | ".join(f"{value:.3f}" for value in bits_of(metrics, row))
        assert f"| {names.get(row) or row} | {numbers} |" in card
    training = metrics["training"]
    kept, last = training["kept"], training["history"][-1]
    said = [
        f"{metrics['parameters']:,} parameters",
        f"({metrics['bytes']:,} bytes)",
        f"{last['step']:,} AdamW steps",
        f"{training['passes']:.1f} passes",
        f"{last['seconds']:.0f} s",
        f"step {kept['step']:,}",
        f"{kept['valid_loss']:.4f} nats per token",
        f"{metrics['task']['right']:,} of {metrics['task']['problems']:,}",
    ]
    if "mtp" in metrics:
        said += [f"{metrics['mtp']['parameters']:,} parameters", f"{metrics['mtp_training']['kept']['step']:,} steps"]
        for what, rates in metrics["mtp"]["acceptance"].items():
            said.append(f"| {what} | {rates['tokens']:,} | {rates['same']:.3f} | {rates['overlap']:.3f} |")
    unwrapped = " ".join(card.split())
    assert [words for words in said if words not in unwrapped] == []


def bits_of(metrics, row):
    return [metrics["bits_per_byte"][row][source] for source in ("all", "kjv", "austen")]


def test_the_card_shows_the_samples(card, metrics):
    assert len(metrics["samples"]) == 5
    for sample in metrics["samples"]:
        assert f"```text\n{sample['text']}\n```" in card


def test_loads_with_plain_transformers_and_writes_english(name):
    """A third of English prose is made of a few words; random weights would write almost none of them."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED[name], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED[name])
    set_seed(0)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(
        ids, do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=120, min_new_tokens=120
    )
    words = [w.strip(".,;:?!\"'").lower() for w in tokenizer.decode(out[0]).split()]
    common = set(COMMON_WORDS.split())
    assert sum(w in common for w in words) > 0.35 * len(words)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_replay_packed_and_stock_agree(loaded, dtype):
    """fp32 state: all three routes the same sampled tokens. fp16 state: replay and packed start out alike."""
    ids = loaded.tokenizer(
        [PROMPT, "Emma, Chapter 56\n\nMr. Knightley"], return_tensors="pt", padding=True, padding_side="left"
    )
    texts = {}
    for mode in ("stock", "packed", "replay"):
        set_seed(1)
        args = dict(do_sample=True, temperature=0.8, top_p=0.95, top_k=0, max_new_tokens=100)
        if mode == "stock":
            texts[mode] = loaded.model.generate(**ids, **args)
        else:
            with replayssm.enable(loaded, ring_len=16, state_dtype=dtype, mode=mode):
                texts[mode] = loaded.model.generate(**ids, **args)
    if dtype == "float32":
        assert torch.equal(texts["replay"], texts["stock"])
        assert torch.equal(texts["packed"], texts["stock"])
    else:
        start = ids.input_ids.shape[1] + 8
        assert torch.equal(texts["replay"][:, :start], texts["stock"][:, :start])


def test_solves_sums_by_replay(loaded):
    """Whole solutions, digit for digit, of problems that it was not trained on."""
    chosen = problems("test", 12)
    assert solve(loaded, chosen, Setting("replay")) == [problem.solution for problem in chosen]


@pytest.fixture(scope="module")
def gdn():
    return load_model("gdn")


@torch.no_grad()
def test_the_mtp_head_agrees_with_its_model_as_published(gdn):
    """On held-out text: how often the head's likeliest token is the model's own. Its weights in another order agree on
    next to nothing."""
    chapters = HELD_OUT.read_text(encoding="utf-8").split("<|endoftext|>\n")
    rows = torch.tensor([gdn.tokenizer("<|endoftext|>" + text).input_ids[:202] for text in chapters[:6]])
    hidden = gdn.model.model(rows[:, :-1]).last_hidden_state
    wanted = gdn.model.lm_head(hidden[:, 1:]).argmax(-1)

    def same(head):
        return float((head.logits(head(hidden[:, :-1], rows[:, 1:-1])).argmax(-1) == wanted).double().mean())

    head = load_mtp(SHIPPED["gdn"], gdn.model)
    published = json.loads((SHIPPED["gdn"] / "metrics.json").read_text())["mtp"]["acceptance"]["held-out text"]
    assert wanted.numel() == 1200
    assert same(head) == pytest.approx(published["same"], abs=0.06)
    assert same(head) > 0.4
    torch.manual_seed(0)
    for parameter in head.parameters():
        parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
    assert same(head) < 0.1
