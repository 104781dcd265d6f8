"""The engine on a GPU: tokens of graphs, merged products and paged attention equal those of the CPU."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from replayssm.engine import attention
from replayssm.engine.core import Engine
from replayssm.engine.graphs import DecodeInputs
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.models.families import layer_specs
from replayssm.models.loading import LoadedModel, load_model
from replayssm.shipped import SHIPPED
from tests.engine.common import with_pages
from tests.engine.test_speculation import Scripted
from tests.models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"memory": 6 * 2**30, "ring_len": 4, "max_requests": 6, "context": 512, "page_size": 16}
MIXTURES = ("kimi_linear", "glm5_next")
PROMPTS = [[7 * i % 89 + j % 7 + 1 for j in range(length)] for i, length in enumerate([1, 2, 3, 17, 40, 90, 33, 5, 64])]


def stock(model, prompt, tokens=24):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def on_gpu(family):
    model = deepcopy(tiny.model_of(family)).cuda()
    if family in MIXTURES:  # products of fp32 experts in groups ask the device for numbers, so nothing is recorded
        model.set_experts_implementation("batched_mm")
    return LoadedModel(model, None, None, model.config, layer_specs(model.config.get_text_config(decoder=True)))


def answers(engine, prompts, params=GREEDY):
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert {request.error for request in requests} == {None}
    engine.slots.check()
    engine.pages.check()
    assert (engine.slots.used_slots, engine.pages.used_pages) == (0, 0)
    return [request.output for request in requests]


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "kimi_linear", "glm5_next"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"graphs": False, "overlap": False, "fuse": False, "paged": False},
        {"chunk_tokens": 7, "mode": "replay", "fuse": False},
        {"mode": "packed", "paged": False, "fuse": False},
        {"mode": "replay", "memory": 6 * 2**30, "max_requests": 3, "fuse": False},
    ],
)
def test_tokens_equal_those_of_stock_decoding_on_the_cpu(family, extra):
    want = [stock(tiny.model_of(family), prompt) for prompt in PROMPTS]
    engine = Engine(on_gpu(family), EngineOptions(**{**OPTIONS, **extra}))
    assert answers(engine, PROMPTS) == want
    assert extra.get("graphs") is False or engine.runner.graphs.failure is None
    engine.close()


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_shipped_models_write_the_same_text(name):
    cpu = load_model(name, device="cpu")
    prompts = [cpu.tokenizer.encode(text) for text in ("In the beginning", "Emma, Chapter 56\n\nMr. Knightley", "She")]
    want = [stock(cpu.model, prompt, 100) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine = Engine(load_model(name, device="cuda"), EngineOptions(memory=6 * 2**30, mode="replay", context=512))
    assert answers(engine, prompts, params) == want
    engine.close()


def test_a_recording_touches_no_slot_and_no_page():
    engine = Engine(on_gpu("qwen3_5_text"), EngineOptions(**OPTIONS, mode="replay"))
    pools = [engine.slots.state, engine.slots.conv, engine.slots.d, engine.slots.k, engine.slots.g]
    pages = [x for layer in engine.pages.arrays for x in layer]
    live = engine.pages.pages * engine.pages.page_size
    for x in (*pools, *pages):
        x.fill_(0.5)
    engine.slots.cursor.fill_(2)
    with torch.inference_mode():
        for route in ("replay", "packed"):
            engine.runner.graphs.run(DecodeInputs.padding(5, engine.slots.device), 3, route)
    assert len(engine.runner.graphs.recorded) == 2
    assert engine.runner.graphs.failure is None
    assert all(bool((x == 0.5).all()) for x in pools)
    assert all(bool((x[:live] == 0.5).all()) for x in pages)
    assert bool((engine.slots.cursor == 2).all())
    engine.close()


@pytest.mark.parametrize("preempt", ["offload", "recompute"])
@pytest.mark.parametrize("mode", ["replay", "packed"])
def test_four_times_as_many_requests_as_fit_stay_within_the_budget(mode, preempt):
    """Pages for a quarter of what runs at its longest, slots for a third of the requests. What the pools, graphs and
    steps take on top of the weights is within what was asked for."""
    prompts = [[(11 * i + 3 * j) % 90 + 1 for j in range(20 + 7 * i % 60)] for i in range(24)]
    want = [stock(tiny.model_of("qwen3_5_text"), prompt, 60) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    loaded = on_gpu("qwen3_5_text")
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    options = {**OPTIONS, "memory": 2**30, "max_requests": 8, "preempt": preempt, "mode": mode, "context": 160}
    with with_pages(16):
        engine = Engine(loaded, EngineOptions(**options))
    longest = sum(engine.pages.pages_for(len(prompt) + 60) for prompt in prompts)
    assert longest > 4 * engine.pages.pages
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    assert [request.output for request in requests] == want
    assert sum(request.preemptions for request in requests) > 0
    assert torch.cuda.max_memory_allocated() - weights <= options["memory"]
    engine.close()


@pytest.mark.parametrize("mode", ["replay", "packed"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_a_chat_with_cached_prefixes_equals_cold_runs(family, mode):
    """Three chats of three turns with one system prompt, all at once: graphs, overlap and snapshots while they run."""
    options = {**OPTIONS, "mode": mode, "prefix_cache": True, "prefix_interval": 16, "chunk_tokens": 64}
    engine = Engine(on_gpu(family), EngineOptions(**options))
    chats = [[j % 83 + 1 for j in range(70)] + [i + 1, 3 * i + 2] for i in range(3)]
    known = [0] * len(chats)
    for turn in range(3):
        requests = [engine.add(chat, GREEDY) for chat in chats]
        engine.run()
        for i, request in enumerate(requests):
            assert request.error is None
            assert request.output == stock(tiny.model_of(family), chats[i])
            if turn:
                assert request.cached_tokens >= known[i] - 1
            known[i] = len(chats[i]) + len(request.output)
            chats[i] = chats[i] + request.output + [5 * turn + i + 1] * i
    engine.prefix.check()
    engine.prefix.clear()
    assert (engine.slots.used_slots, engine.pages.used_pages, engine.prefix.states.used_slots) == (0, 0, 0)
    engine.close()


@pytest.mark.parametrize("options", [{}, {"graphs": False, "paged": False}, {"chunk_tokens": 7, "max_requests": 3}])
@pytest.mark.parametrize("state", ["ring", "snapshot", "kv-replay", "fold"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_drafts_change_no_token(family, state, options):
    """Windows of which 0, 1, 2 or all drafts are right, or that have none, beside each other and beside prompts."""
    want = [stock(tiny.model_of(family), prompt) for prompt in PROMPTS]
    spec = {
        "spec": "ngram",
        "spec_tokens": 3,
        "spec_adaptive": False,
        "ring_len": 8,
        "spec_state": state,
        "fuse": False,
    }
    engine = Engine(on_gpu(family), EngineOptions(**{**OPTIONS, **spec, "spec_state": state, **options}))
    truths = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, want, strict=True)}
    drafter = engine.drafter = Scripted(truths, [0, None, 3, 1, 2, 3])
    assert answers(engine, PROMPTS) == want
    assert set(drafter.windows) == {0, 1, 2, 3}
    assert options.get("graphs") is False or engine.runner.graphs.failure is None
    engine.close()


def test_the_shipped_head_drafts_on_a_gpu():
    cpu = load_model("gdn", device="cpu")
    prompts = [cpu.tokenizer.encode(text) for text in ("In the beginning", "Emma, Chapter 56", "She")]
    want = [stock(cpu.model, prompt, 100) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    options = {"memory": 6 * 2**30, "context": 512, "ring_len": 16, "spec": "mtp", "spec_adaptive": False}
    engine = Engine(load_model("gdn", device="cuda"), EngineOptions(**options))
    assert answers(engine, prompts, params) == want
    assert engine.stats.drafts_kept > 0.3 * engine.stats.drafted
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "shared", "dim"), [(8, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize("size", [16, 64])
def test_paged_attention_equals_attention_on_gathered_contexts(dtype, heads, shared, dim, size):
    """Rows from one token to several pages, pages in any order; what lies behind a row's newest token is ignored."""
    gen = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, size - 1, size, 3 * size + 5, 5 * size - 1])
    table = torch.randperm(40, generator=gen)[:30].view(5, 6)
    key, value = (torch.randn(40 * size, shared, dim, generator=gen).to(dtype) for _ in range(2))
    query = torch.randn(5, heads, 1, dim, generator=gen).to(dtype)
    want = torch.empty(5, heads, 1, dim, dtype=torch.float64)
    for row, last in enumerate(positions.tolist()):
        at = (table[row][:, None] * size + torch.arange(size)).flatten()[: last + 1]
        k, v = (x[at].double().transpose(0, 1).repeat_interleave(heads // shared, 0) for x in (key, value))
        want[row] = (query[row].double() @ k.mT * dim**-0.5).softmax(-1) @ v
    blocks = attention.blocks_of(table.cuda(), positions.cuda(), size)
    views = (x.cuda().transpose(0, 1)[None] for x in (key, value))
    with torch.inference_mode():
        got = torch.compile(attention.attend, dynamic=False)(query.cuda(), *views, blocks, dim**-0.5)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5  # weights are rounded to the values' dtype; |v| reaches 4
    assert float((got.double().cpu() - want).abs().max()) < limit
