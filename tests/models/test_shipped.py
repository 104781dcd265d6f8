"""The shipped model: what its card promises, and equal text by every route."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import replayssm
from replayssm.models.loading import load_model
from replayssm.shipped import SHIPPED

COMMON_WORDS = """
the and of to in that he it his for they was with be him i not them is as unto shall said all which her she had my thou
lord a but were from there this so by at have out up who me their no you
"""
PROMPT = "Genesis 51\n\nAnd it came to pass"


@pytest.fixture(scope="module")
def gdn():
    return load_model("gdn")


def test_size_and_geometry(gdn):
    assert 5e6 <= gdn.model.num_parameters() <= 12e6
    assert (SHIPPED["gdn"] / "model.safetensors").stat().st_size < 16 * 2**20
    assert {(s.num_k_heads, s.num_v_heads, s.head_k_dim, s.head_v_dim) for s in gdn.specs} == {(2, 4, 128, 128)}
    assert gdn.config.model_type == "qwen3_5_text"


def test_card_and_metrics_agree():
    metrics = json.loads((SHIPPED["gdn"] / "metrics.json").read_text())
    card = (SHIPPED["gdn"] / "README.md").read_text()
    bits = metrics["bits_per_byte"]
    assert bits["model"]["all"] < bits["byte 5-gram"]["all"] < bits["byte 1-gram"]["all"]
    for row in bits.values():
        assert f"{row['all']:.3f}" in card
    weights = (SHIPPED["gdn"] / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == metrics["weights_sha256"]


def test_loads_with_plain_transformers_and_writes_english(gdn):
    """A third of English prose is made of a few words; random weights would write almost none of them."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED["gdn"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED["gdn"])
    set_seed(0)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(
        ids, do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=120, min_new_tokens=120
    )
    words = [w.strip(".,;:?!\"'").lower() for w in tokenizer.decode(out[0]).split()]
    common = set(COMMON_WORDS.split())
    assert sum(w in common for w in words) > 0.35 * len(words)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_replay_packed_and_stock_agree(gdn, dtype):
    """fp32 state: all three routes the same sampled tokens. fp16 state: replay and packed start out alike."""
    ids = gdn.tokenizer(
        [PROMPT, "Emma, Chapter 56\n\nMr. Knightley"], return_tensors="pt", padding=True, padding_side="left"
    )
    texts = {}
    for mode in ("stock", "packed", "replay"):
        set_seed(1)
        args = dict(do_sample=True, temperature=0.8, top_p=0.95, top_k=0, max_new_tokens=100)
        if mode == "stock":
            texts[mode] = gdn.model.generate(**ids, **args)
        else:
            with replayssm.enable(gdn, ring_len=16, state_dtype=dtype, mode=mode):
                texts[mode] = gdn.model.generate(**ids, **args)
    if dtype == "float32":
        assert torch.equal(texts["replay"], texts["stock"])
        assert torch.equal(texts["packed"], texts["stock"])
    else:
        start = ids.input_ids.shape[1] + 8
        assert torch.equal(texts["replay"][:, :start], texts["stock"][:, :start])
