"""Replay decode gives the tokens that stock transformers gives, in every way people call `generate`.

fp32, random weights. Greedy tokens must be equal; logits may differ by what stock's own chunked and stepwise paths
differ from each other.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import replayssm
from replayssm.models.cache import ReplayCache, ReplayLayer
from tests.models.tiny import FAMILIES, model_of, prompt

RINGS = (1, 3, 16)
NEW = 64


def greedy(model, ids, new=NEW, **kwargs):
    kwargs = {
        "do_sample": False,
        "max_new_tokens": new,
        "return_dict_in_generate": True,
        "output_logits": True,
        **kwargs,
    }
    result = model.generate(ids, **kwargs)
    return result.sequences, torch.stack(result.logits, 1), result


def logit_noise(logits: torch.Tensor) -> float:
    """fp32 rounding through four layers and 64 steps, against the size of the logits."""
    return 2e-4 * float(logits.abs().max())


def assert_same(ours, stock):
    assert torch.equal(ours[0], stock[0])
    assert float((ours[1] - stock[1]).abs().max()) <= logit_noise(stock[1])


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family, ring_len):
    model, ids = model_of(family), prompt(2, 9)
    stock = greedy(model, ids)
    assert len(set(stock[0][0, 9:].tolist())) > 8, "the model repeats itself; this comparison could not fail"
    with replayssm.enable(model, ring_len=ring_len):
        ours = greedy(model, ids)
    layers = [layer for layer in ours[2].past_key_values.layers if isinstance(layer, ReplayLayer)]
    assert len(layers) == 3
    steps = NEW - 1
    assert all(layer.cursor.tolist() == [steps % ring_len] * 2 for layer in layers)
    assert_same(ours, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_mode(family):
    model, ids = model_of(family), prompt(2, 9)
    stock = greedy(model, ids, 24)
    with replayssm.enable(model, mode="packed"):
        ours = greedy(model, ids, 24)
    assert all(layer.ring is None for layer in ours[2].past_key_values.layers if isinstance(layer, ReplayLayer))
    assert_same(ours, stock)


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_of_one_token(family, ring_len):
    model, ids = model_of(family), prompt(1, 1)
    stock = greedy(model, ids, 40)
    with replayssm.enable(model, ring_len=ring_len):
        assert_same(greedy(model, ids, 40), stock)


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch(family, ring_len):
    model = model_of(family)
    ids, mask = prompt(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, pads in enumerate((0, 5, 11)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    stock = greedy(model, ids, 40, attention_mask=mask)
    with replayssm.enable(model, ring_len=ring_len):
        assert_same(greedy(model, ids, 40, attention_mask=mask), stock)


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_on_a_part_full_ring(family, ring_len):
    """A forward of several tokens must read checkpoint + ring, not the checkpoint alone."""
    model = model_of(family)

    def two_turns():
        first = greedy(model, prompt(2, 9), 12)
        ids = torch.cat([first[0], prompt(2, 5, seed=3)], dim=1)
        return greedy(model, ids, 30, past_key_values=first[2].past_key_values)

    stock = two_turns()
    with replayssm.enable(model, ring_len=ring_len):
        assert_same(two_turns(), stock)


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_deep_copied_cache(family, ring_len):
    """A copy taken in mid-ring goes its own way, and leaves the original alone."""
    model = model_of(family)

    def fork():
        first = greedy(model, prompt(1, 9), 12)
        copied = copy.deepcopy(first[2].past_key_values)
        turns = []
        for cache, seed in ((first[2].past_key_values, 3), (copied, 4)):
            ids = torch.cat([first[0], prompt(1, 1, seed=seed)], dim=1)
            turns.append(greedy(model, ids, 20, past_key_values=cache))
        return turns

    stock = fork()
    with replayssm.enable(model, ring_len=ring_len):
        for ours, theirs in zip(fork(), stock, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family, ring_len):
    model, ids = model_of(family), prompt(2, 9)
    args = dict(num_beams=3, max_new_tokens=24, do_sample=False)
    stock = model.generate(ids, **args)
    with replayssm.enable(model, ring_len=ring_len):
        assert torch.equal(model.generate(ids, **args), stock)


@pytest.mark.parametrize("ring_len", RINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_with_a_seed(family, ring_len):
    model, ids = model_of(family), prompt(2, 9)

    def sample():
        torch.manual_seed(5)
        return model.generate(ids, do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2, max_new_tokens=40)

    stock = sample()
    with replayssm.enable(model, ring_len=ring_len):
        assert torch.equal(sample(), stock)


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_static_cache(family):
    model, ids = model_of(family), prompt(2, 9)

    def run():
        cache = StaticCache(config=model.config, max_cache_len=64)
        return greedy(model, ids, 30, past_key_values=cache, disable_compile=True)

    stock = run()
    with replayssm.enable(model, ring_len=4):
        assert_same(run(), stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_explicit_cache_keeps_its_own_options(family):
    model, ids = model_of(family), prompt(2, 9)
    stock = greedy(model, ids, 30)
    cache = ReplayCache(model.config, ring_len=5)
    with replayssm.enable(model, ring_len=16):
        assert_same(greedy(model, ids, 30, past_key_values=cache), stock)
    ring = next(layer.ring for layer in cache.layers if isinstance(layer, ReplayLayer))
    assert ring[0].shape[2] == 5


def test_chunked_prefill_matches():
    model, ids = model_of("qwen3_5_text"), prompt(1, 37)
    stock = greedy(model, ids, 20)
    with replayssm.enable(model, ring_len=4):
        assert_same(greedy(model, ids, 20, prefill_chunk_size=8), stock)


def test_one_token_at_a_time_equals_one_prefill():
    """The decode path alone, from the first token on, ends in the logits of a single long forward."""
    for family in FAMILIES:
        model, ids = model_of(family), prompt(2, 33)
        with torch.no_grad():
            whole = model(ids).logits
            cache = DynamicCache(config=model.config)
            with replayssm.enable(model, ring_len=16):
                steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(33)]
        assert float((torch.cat(steps, 1) - whole).abs().max()) <= logit_noise(whole)
