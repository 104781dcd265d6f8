"""What users do around `generate`: hooks, gradients, autocast, broken forwards, handles in any order."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

import replayssm
from replayssm import ops
from replayssm.errors import CacheStateError, DtypeError, ShapeError, UnsupportedModelError
from replayssm.models.cache import ReplayCache, ReplayLayer
from replayssm.models.layers import ADAPTERS, ReplayMixin
from replayssm.models.loading import load_model
from replayssm.shipped import SHIPPED
from tests.models.test_parity import logit_noise
from tests.models.tiny import FAMILIES, model_of, prompt


def greedy(model, ids, new=24, **kwargs):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


def linear_layers(model):
    return [m for m in model.modules() if type(m).__name__.removeprefix("Replay") in ADAPTERS]


def loop(model, ids, steps, cache):
    """Decode by hand: returns the tokens."""
    tokens, x = [], ids
    for _ in range(steps):
        x = model(x, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(x)
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("ring_len", [3, 16])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_reading_states_in_mid_forward_changes_nothing(at, ring_len):
    """A hook on one linear layer reads the states of all; each is the state after the token its layer has seen."""
    model, ids = copy.deepcopy(model_of("qwen3_5_text")), prompt(2, 9)
    with replayssm.enable(model, mode="packed"):
        packed, seen_packed = DynamicCache(config=model.config), []
        hook = linear_layers(model)[at].register_forward_hook(lambda *_: seen_packed.append(states(packed)))
        stock = greedy(model, ids, past_key_values=packed)
        hook.remove()
    with replayssm.enable(model, ring_len=ring_len):
        cache, seen = DynamicCache(config=model.config), []
        linear_layers(model)[at].register_forward_hook(lambda *_: seen.append(states(cache)))
        assert torch.equal(greedy(model, ids, past_key_values=cache), stock)
    for ours, want in zip(seen[1:], seen_packed[1:], strict=True):
        for x, y in zip(ours, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def offload(cache, *at):
    for i in at:
        cache.layers[i].offload()


def overwrite(cache, state):
    cache.layers[3].update_recurrent_state(state)


def states(cache):
    return [cache.layers[i].recurrent_states[0].clone() for i in (0, 1, 3) if cache.layers[i].has_previous_state[0]]


def test_moving_a_cache_in_mid_forward_changes_nothing():
    model, ids = copy.deepcopy(model_of("qwen3_5_text")), prompt(1, 9)
    stock = greedy(model, ids)
    with replayssm.enable(model, ring_len=4):
        cache = DynamicCache(config=model.config)
        linear_layers(model)[1].register_forward_hook(lambda *_: offload(cache, 0, 3))
        assert torch.equal(greedy(model, ids, past_key_values=cache), stock)


def test_a_state_written_in_mid_forward_is_the_state():
    model = copy.deepcopy(model_of("qwen3_5_text"))
    finals = []
    for mode in ("packed", "replay"):
        cache = DynamicCache(config=model.config)
        with replayssm.enable(model, ring_len=4, mode=mode), torch.no_grad():
            loop(model, prompt(1, 9), 3, cache)
            zero = torch.zeros_like(cache.layers[3].recurrent_states[0])
            hook = linear_layers(model)[0].register_forward_hook(
                lambda *_, cache=cache, zero=zero: overwrite(cache, zero)
            )
            model(prompt(1, 1), past_key_values=cache)
            hook.remove()
        finals.append(cache.layers[3].recurrent_states[0])
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ring_len", [1, 4, 16])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_after_a_broken_forward_the_cache_is_as_packed_decode_leaves_it(ring_len, steps_before):
    """The layers before the error have taken the step, the others not; what follows is the same in both modes."""
    model = copy.deepcopy(model_of("kimi_linear"))
    logits = []
    for mode in ("packed", "replay"):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), replayssm.enable(model, ring_len=ring_len, mode=mode):
            loop(model, prompt(1, 9), 1 + steps_before, cache)
            hook = linear_layers(model)[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(prompt(1, 1, seed=2), past_key_values=cache)
            hook.remove()
            model(prompt(1, 1, seed=3), past_key_values=cache)
            logits.append(model(prompt(1, 4, seed=4), past_key_values=cache).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_part_of_a_model_can_be_enabled():
    model, ids = copy.deepcopy(model_of("qwen3_5_text")), prompt(2, 9)
    stock = greedy(model, ids)
    with replayssm.enable(model.model.layers[0], ring_len=4), ops.count_traffic() as traffic:
        assert torch.equal(greedy(model, ids), stock)
    assert traffic.totals().rows == 2 * 23
    with replayssm.enable(model, ring_len=4):
        replayssm.disable(model.model.layers[3])
        assert torch.equal(greedy(model, ids), stock)


@pytest.mark.parametrize("mode", ["replay", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_loop_with_gradients_on(family, mode):
    model, ids = model_of(family), prompt(2, 9)
    with torch.no_grad():
        stock = loop(model, ids, 12, DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    with replayssm.enable(model, ring_len=4, mode=mode):
        assert torch.equal(loop(model, ids, 12, cache), stock)
    for layer in cache.layers:
        if isinstance(layer, ReplayLayer):
            assert not any(t.requires_grad for t in layer.ring or ())


@pytest.mark.parametrize("trained", ["", "A_log", "conv1d.weight", "in_proj_b"])
def test_a_backward_through_a_decode_step_is_an_error(trained):
    model, cache = copy.deepcopy(model_of("qwen3_5_text")), DynamicCache(config=model_of("qwen3_5_text").config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name or "lm_head" in name)
    with replayssm.enable(model):
        with torch.no_grad():
            model(prompt(1, 5), past_key_values=cache)
        with pytest.raises(CacheStateError, match="no backward"):
            model(prompt(1, 1), past_key_values=cache).logits.sum().backward()


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_autocast(family):
    """Entering and leaving autocast changes the ring's dtype; outside, decode is exact again."""
    model, ids = model_of(family), prompt(2, 9)
    with torch.no_grad():
        results = []
        for mode in ("packed", "replay"):
            with replayssm.enable(model, ring_len=4, mode=mode):
                cache = DynamicCache(config=model.config)
                with torch.autocast("cpu", torch.bfloat16):
                    model(ids, past_key_values=cache)  # allocates a bf16 ring
                results.append([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(9)])
        assert {x.ring[1].dtype for x in cache.layers if isinstance(x, ReplayLayer)} == {torch.float32}
    with torch.no_grad(), replayssm.enable(model, ring_len=4), torch.autocast("cpu", torch.bfloat16):
        model(ids[:, :1], past_key_values=cache)  # and into it, in mid-ring
    for packed, replay in zip(*results, strict=True):
        assert float((packed - replay).abs().max()) <= logit_noise(packed)


def test_another_default_dtype():
    model, ids = model_of("qwen3_5_text"), prompt(1, 9)
    stock = greedy(model, ids)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with replayssm.enable(model, ring_len=7), torch.no_grad():
            cache = ReplayCache(model.config, ring_len=7)
            x = torch.randn(1, 1, model.config.hidden_size, dtype=torch.float32)
            layer = linear_layers(model)[0]
            layer(x, cache)
            for _ in range(9):
                layer(x, cache)
    finally:
        torch.set_default_dtype(before)
    with replayssm.enable(model, ring_len=7):
        assert torch.equal(greedy(model, ids), stock)


def test_a_refused_enable_leaves_the_model_alone():
    model = copy.deepcopy(model_of("qwen3_5_text"))
    layers = linear_layers(model)
    layers[1].activation = "gelu"
    with pytest.raises(UnsupportedModelError, match="'gelu'"):
        replayssm.enable(model)
    layers[1].activation = "silu"
    layers[2].head_k_dim = 320
    with pytest.raises(ShapeError, match="320"):
        replayssm.enable(model)
    layers[2].head_k_dim = 16
    with pytest.raises(DtypeError, match="float64"):
        replayssm.enable(model.double())
    assert not any(isinstance(layer, ReplayMixin) for layer in linear_layers(model))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_handles_in_any_order(order):
    model = copy.deepcopy(model_of("qwen3_5_text"))
    before = [type(layer) for layer in linear_layers(model)]
    handles = [replayssm.enable(model, ring_len) for ring_len in (4, 8, 16)]
    left = [0, 1, 2]
    for i in order:
        handles[i].disable()
        handles[i].disable()
        left.remove(i)
        if left:
            assert linear_layers(model)[0].replay.ring_len == (4, 8, 16)[left[-1]]
    assert [type(layer) for layer in linear_layers(model)] == before


def test_handles_of_a_model_and_of_its_parts():
    model = copy.deepcopy(model_of("qwen3_5_text"))
    before = [type(layer) for layer in linear_layers(model)]
    outer, inner = replayssm.enable(model, 4), replayssm.enable(model.model, 8)
    outer.disable()
    assert linear_layers(model)[0].replay.ring_len == 8
    inner.disable()
    assert [type(layer) for layer in linear_layers(model)] == before
    outer, inner = replayssm.enable(model, 4), replayssm.enable(model.model, 8)
    replayssm.disable(model)
    inner.disable()
    outer.disable()
    assert [type(layer) for layer in linear_layers(model)] == before


def test_an_enabled_model_can_be_collected():
    model = copy.deepcopy(model_of("qwen3_5_text"))
    replayssm.enable(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_models_load_in_several_threads(tmp_path):
    folder = SHIPPED["gdn"]
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(lambda _: load_model(folder).model, range(3)))
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    assert module.Qwen3_5GatedDeltaNet.__name__ == "Qwen3_5GatedDeltaNet"
    assert "A_log" not in (module.Qwen3_5ForCausalLM._keep_in_fp32_modules_strict or ())
    assert len({next(m.parameters()).sum().item() for m in models}) == 1


def test_disable_gives_the_stock_classes_back():
    model = copy.deepcopy(model_of("olmo_hybrid"))
    before = [type(layer) for layer in linear_layers(model)]
    handle = replayssm.enable(model)
    replayssm.disable(model)
    assert [type(layer) for layer in linear_layers(model)] == before
    handle.disable()
    assert [type(layer) for layer in linear_layers(model)] == before


def test_beams_decode_packed_and_reset_ends_that():
    model, cache = model_of("qwen3_5_text"), ReplayCache(model_of("qwen3_5_text").config)
    with replayssm.enable(model), ops.count_traffic() as traffic:
        model.generate(prompt(1, 5), num_beams=3, max_new_tokens=12, do_sample=False, past_key_values=cache)
        layer = next(layer for layer in cache.layers if isinstance(layer, ReplayLayer))
        assert layer.packed
        # The first step may still go to the ring; every other one is packed.
        assert traffic.totals().appends <= 3 * 3
        cache.reset()
        assert not layer.packed


def test_recording_caches_keep_recording():
    """A cache that records its past, as assisted decoding asks for, is adopted as such and takes the stock path."""
    model, ids = model_of("qwen3_5_text"), prompt(1, 9)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with replayssm.enable(model), torch.no_grad(), ops.count_traffic() as traffic:
        model(ids, past_key_values=cache)
        model(prompt(1, 1), past_key_values=cache)
    assert traffic.totals().rows == 0
    assert cache.layers[0].record_past
    assert cache.layers[0].conv_states[0].shape[-1] == 10


def test_offload_keeps_the_home_device():
    model, cache = model_of("qwen3_5_text"), ReplayCache(model_of("qwen3_5_text").config)
    with replayssm.enable(model):
        greedy(model, prompt(1, 5), 4, past_key_values=cache)
    layer = cache.layers[0]
    layer.device = home = torch.device("meta")  # stands for a GPU
    layer.offload()
    assert layer.device == home
    assert layer.checkpoint.device.type == "cpu"


def test_single_token_mask_is_applied():
    """A row whose only token is masked contributes zero, as in the stock layer."""
    model = model_of("kimi_linear")
    x = torch.randn(2, 1, model.config.hidden_size)
    mask = torch.tensor([[1], [0]])
    results = []
    for mode in ("stock", "replay"):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), replayssm.enable(model):
            layer = linear_layers(model)[0]
            layer(torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(1)), cache)
            if mode == "stock":
                replayssm.disable(model)
            results.append(layer(x, cache, mask))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_what_load_model_returns_can_be_enabled():
    class Loaded:
        model = model_of("qwen3_5_text")

    with replayssm.enable(Loaded()):
        assert isinstance(linear_layers(Loaded.model)[0], ReplayMixin)
    replayssm.enable(Loaded())
    replayssm.disable(Loaded())
    assert not isinstance(linear_layers(Loaded.model)[0], ReplayMixin)
