"""Switching replay on and off, on models that were built in any way."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

import replayssm
from replayssm import ops
from replayssm.errors import (
    CacheStateError,
    DtypeError,
    OptionError,
    RingLengthError,
    ShapeError,
    UnsupportedModelError,
)
from replayssm.models.cache import ReplayCache, ReplayLayer
from replayssm.models.layers import ADAPTERS, ReplayMixin
from tests.models.tiny import FAMILIES, config_of, model_of, prompt


def greedy(model, ids, new=24, **kwargs):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


def linear_layers(model):
    return [m for m in model.modules() if type(m).__name__.removeprefix("Replay") in ADAPTERS]


@pytest.mark.parametrize("family", FAMILIES)
def test_context_manager_restores_the_stock_classes(family):
    model = model_of(family)
    before = [type(layer) for layer in linear_layers(model)]
    assert len(before) == 3
    with replayssm.enable(model) as enabled:
        assert all(isinstance(layer, ReplayMixin) for layer in linear_layers(model))
        assert len(enabled.specs) == 3
    assert [type(layer) for layer in linear_layers(model)] == before


def test_nested_enable_restores_the_outer_options():
    model = model_of("qwen3_5_text")
    with replayssm.enable(model, ring_len=4):
        with replayssm.enable(model, ring_len=8, state_dtype="bf16"):
            assert linear_layers(model)[0].replay.ring_len == 8
        assert linear_layers(model)[0].replay.ring_len == 4


def test_disable_after_enable():
    model = copy.deepcopy(model_of("qwen3_5_text"))
    replayssm.enable(model)
    replayssm.disable(model)
    ids = prompt(1, 5)
    with ops.count_traffic() as traffic:
        assert torch.equal(greedy(model, ids), greedy(model_of("qwen3_5_text"), ids))
    assert traffic.totals().rows == 0


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_patch_puts_replay_layers_into_a_new_model(family):
    stock = model_of(family)
    with replayssm.patch(ring_len=4):
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()
    model.load_state_dict(stock.state_dict())
    assert [layer.replay.ring_len for layer in linear_layers(model)] == [4, 4, 4]
    ids = prompt(2, 9)
    with ops.count_traffic() as traffic:
        assert torch.equal(greedy(model, ids), greedy(stock, ids))
    assert traffic.totals().flushes > 0
    assert not any(isinstance(m, ReplayMixin) for m in AutoModelForCausalLM.from_config(config_of(family)).modules())


def test_disabling_in_mid_ring_loses_nothing():
    """A stock forward on a cache whose ring holds records reads the flushed state."""
    model, ids = model_of("qwen3_5_text"), prompt(2, 9)
    stock = greedy(model, ids, 40)
    cache = DynamicCache(config=model.config)
    with replayssm.enable(model, ring_len=16):
        first = greedy(model, ids, 12, past_key_values=cache)
    assert torch.equal(greedy(model, first, 28, past_key_values=cache), stock)


def test_enabling_in_mid_generation_adopts_the_state():
    model, ids = model_of("olmo_hybrid"), prompt(2, 9)
    stock = greedy(model, ids, 40)
    cache = DynamicCache(config=model.config)
    first = greedy(model, ids, 12, past_key_values=cache)
    with replayssm.enable(model, ring_len=16):
        assert torch.equal(greedy(model, first, 28, past_key_values=cache), stock)


def test_hooked_modules_use_the_new_forward():
    """Device-map hooks keep the bound forward of the class they found; the swap must reach it."""
    model, ids = copy.deepcopy(model_of("qwen3_5_text")), prompt(1, 9)
    for layer in linear_layers(model):
        layer._old_forward = layer.forward
        layer.forward = lambda *args, _layer=layer, **kwargs: _layer._old_forward(*args, **kwargs)
    with ops.count_traffic() as traffic, replayssm.enable(model, ring_len=4):
        greedy(model, ids)
    assert traffic.totals().flushes > 0
    with ops.count_traffic() as traffic:
        greedy(model, ids)
    assert traffic.totals().rows == 0


def test_a_model_with_replay_layers_can_be_pickled():
    model = copy.deepcopy(model_of("qwen3_5_text"))
    replayssm.enable(model, ring_len=4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(greedy(again, prompt(1, 5)), greedy(model, prompt(1, 5)))


def test_forward_without_a_cache_and_training_are_stock():
    model, ids = model_of("kimi_linear"), prompt(2, 9)
    with replayssm.enable(model), ops.count_traffic() as traffic:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    assert traffic.totals().rows == 0
    model.zero_grad()


@pytest.mark.parametrize("ring_len", [0, 65, -1, 1.5, True])
def test_ring_length_is_checked(ring_len):
    with pytest.raises(RingLengthError, match=r"1…64"):
        replayssm.enable(model_of("qwen3_5_text"), ring_len=ring_len)


def test_options_are_checked():
    model = model_of("qwen3_5_text")
    with pytest.raises(DtypeError, match="float8"):
        replayssm.enable(model, state_dtype="float8")
    with pytest.raises(OptionError, match="'ring'"):
        replayssm.enable(model, mode="ring")
    with pytest.raises(UnsupportedModelError, match="qwen3_next"):
        replayssm.enable(nn.Linear(2, 2))
    assert not any(isinstance(layer, ReplayMixin) for layer in linear_layers(model))


def test_state_dtype_precedence(monkeypatch):
    model = copy.deepcopy(model_of("qwen3_5_text"))

    def state_dtype(**kwargs):
        cache = DynamicCache(config=model.config)
        with replayssm.enable(model, **kwargs):
            greedy(model, prompt(1, 5), 3, past_key_values=cache)
        return next(layer.checkpoint.dtype for layer in cache.layers if isinstance(layer, ReplayLayer))

    monkeypatch.delenv("REPLAYSSM_STATE_DTYPE", raising=False)
    model.config.mamba_ssm_dtype = None
    assert state_dtype() == torch.float32
    model.config.mamba_ssm_dtype = "bfloat16"
    assert state_dtype() == torch.bfloat16
    monkeypatch.setenv("REPLAYSSM_STATE_DTYPE", "fp16")
    assert state_dtype() == torch.float16
    assert state_dtype(state_dtype=torch.float32) == torch.float32


def test_cache_without_config_is_refused():
    model = model_of("qwen3_5_text")
    with replayssm.enable(model), pytest.raises(CacheStateError, match="config"):
        model(prompt(1, 3), past_key_values=DynamicCache())


def test_cache_of_another_batch_size_is_refused():
    model, cache = model_of("qwen3_5_text"), ReplayCache(model_of("qwen3_5_text").config)
    with replayssm.enable(model), torch.no_grad():
        model(prompt(2, 5), past_key_values=cache)
        with pytest.raises(ShapeError, match=r"1 rows, the cache 2"):
            model(prompt(1, 1), past_key_values=cache)


@pytest.mark.parametrize("change", ["select", "repeat", "offload"])
def test_batch_edits_in_mid_ring(change):
    """Selecting, repeating or moving rows acts on the flushed state of every layer."""
    model, ids = model_of("qwen3_next"), prompt(3, 9)
    rows = {"select": [2, 0], "repeat": [0, 0, 1, 1, 2, 2], "offload": [0, 1, 2]}[change]
    cache = ReplayCache(model.config, ring_len=16)
    with replayssm.enable(model):
        first = greedy(model, ids, 7, past_key_values=cache)
        if change == "select":
            cache.batch_select_indices(torch.tensor(rows))
        elif change == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            for layer in cache.layers:
                layer.offload()
                layer.prefetch()
        ours = greedy(model, first[rows], 20, past_key_values=cache)
    assert torch.equal(ours, greedy(model, ids, 27)[rows])


def test_reset_cache_starts_anew():
    model, cache = model_of("bailing_hybrid"), ReplayCache(model_of("bailing_hybrid").config, ring_len=16)
    with replayssm.enable(model):
        first = greedy(model, prompt(2, 9), 12, past_key_values=cache)
        cache.layers = [
            layer if isinstance(layer, ReplayLayer) else fresh
            for layer, fresh in zip(cache.layers, DynamicCache(config=model.config).layers, strict=True)
        ]
        cache.reset()
        again = greedy(model, prompt(2, 9), 12, past_key_values=cache)
    assert torch.equal(first, again)


def test_cursors_move_once_per_forward():
    """Prefill leaves them at zero, a step moves each by one."""
    model, cache = model_of("qwen3_5_text"), ReplayCache(model_of("qwen3_5_text").config, ring_len=64)
    layers = [layer for layer in cache.layers if isinstance(layer, ReplayLayer)]
    with replayssm.enable(model), torch.no_grad():
        model(prompt(2, 5), past_key_values=cache)
        assert [layer.cursor.tolist() for layer in layers] == [[0, 0]] * 3
        for step in range(1, 41):
            model(prompt(2, 1, seed=step), past_key_values=cache)
            assert [layer.cursor.tolist() for layer in layers] == [[step, step]] * 3


def test_traffic_counted_by_the_ops_is_the_model_of_the_spec():
    model, ring_len = model_of("qwen3_5_text"), 8
    with ops.count_traffic() as traffic, replayssm.enable(model, ring_len=ring_len) as enabled:
        greedy(model, prompt(1, 5), 1 + 3 * ring_len)
    totals = traffic.totals()
    expected = [replayssm.spec.replay_traffic(spec, ring_len, "float32", "float32") for spec in enabled.specs]
    tokens = 3 * ring_len
    assert totals.state_read + totals.ring_read == tokens * sum(t.read for t in expected)
    assert totals.state_written + totals.ring_written == tokens * sum(t.written for t in expected)
    assert totals.flushes == 3 * len(enabled.specs)


@pytest.mark.parametrize("mode", ["auto", "replay", "packed"])
def test_decode_compiles_without_graph_breaks_or_recompiles(mode):
    torch.compiler.reset()
    model = copy.deepcopy(model_of("qwen3_5_text"))
    ids = prompt(1, 9)
    cache = ReplayCache(model.config, ring_len=4, mode=mode)
    layer = linear_layers(model)[-1]
    with replayssm.enable(model), torch.no_grad():
        model(ids, past_key_values=cache)
        x = torch.randn(1, 1, model.config.hidden_size)
        expected_cache = copy.deepcopy(cache)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(6):
                assert torch.equal(compiled(x, cache), layer(x, expected_cache))
