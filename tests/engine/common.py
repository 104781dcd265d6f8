"""Engines on tiny random models, and what stock decoding says they must answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import patch

import torch

from replayssm.engine import setup
from replayssm.engine.core import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.models.families import layer_specs
from replayssm.models.loading import LoadedModel
from tests.models import tiny

FAMILIES = [family for family in tiny.FAMILIES if not family.startswith("qwen4_exp")]  # its indexer runs on the host
SMALL = "qwen3_5_text"
OPTIONS = {"ring_len": 4, "max_requests": 4, "page_size": 4, "context": 96, "mode": "replay", "memory": 2**30}
TOKENS = 16  # that stock decoding makes of a prompt
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 31, 40)
GAP = 1e-3  # least distance of the two largest logits; errors are 1e-5 (`test_logprobs_are_those_of_stock_decoding`)
MOST_STEPS = 5000  # of a run that ends at all
NAN = float("nan")


@functools.cache
def loaded_of(family: str = SMALL) -> LoadedModel:
    """A model for engines, none of the stock ones, without a tokenizer."""
    return as_loaded(deepcopy(tiny.model_of(family)))


def as_loaded(model, tokenizer=None) -> LoadedModel:
    return LoadedModel(model, tokenizer, None, model.config, layer_specs(model.config.get_text_config(decoder=True)))


@contextmanager
def with_pages(pages: int | None, states: int = 5) -> Iterator[None]:
    """Engines built inside have so many pages, None for what their slots can fill, and few states in the cache."""
    plan_memory = setup.plan_memory

    def plan(*args):
        found = plan_memory(*args)
        found = dataclasses.replace(found, reserved_slots=min(found.reserved_slots, states))
        return found if pages is None else dataclasses.replace(found, pages=pages)

    with patch.object(setup, "plan_memory", plan):
        yield


@contextmanager
def engine_of(
    model: str | LoadedModel = SMALL, pages: int | None = None, states: int = 5, **options
) -> Iterator[Engine]:
    with with_pages(pages, states):
        loaded = loaded_of(model) if isinstance(model, str) else model
        engine = Engine(loaded, EngineOptions(**{**OPTIONS, **options}))
    try:
        yield engine
    finally:
        engine.close()


def greedy(tokens: int = TOKENS, **change) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, **change)


def random_tokens(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(tiny.prompt(1, length, 1000 * seed + length)[0].tolist())


@functools.cache
def stock(family: str, prompt: tuple[int, ...], tokens: int = TOKENS, **options) -> list[int]:
    """What transformers' generate makes of one prompt alone."""
    return stock_with_logits(family, prompt, tokens, **options)[0]


@functools.cache
def stock_with_logits(family: str, prompt, tokens: int = TOKENS, **options) -> tuple[list[int], torch.Tensor, float]:
    """Tokens, the model's own logits [tokens, vocabulary], and the least distance of two best scores."""
    ids = torch.tensor([prompt])
    out = tiny.model_of(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
        output_logits=True, output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    best = torch.stack(out.scores)[:, 0].topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    return out.sequences[0, len(prompt) :].tolist(), torch.stack(out.logits)[:, 0], gap


@functools.cache
def prompt_of(family: str, length: int, which: int = 0, **options) -> tuple[int, ...]:
    """A random prompt whose stock answer depends on no near tie: greedy tokens of a random model are compared, and two
    logits as close as rounding errors could stand in either order."""
    for seed in range(which, 1000, 10):
        prompt = random_tokens(length, seed)
        if stock_with_logits(family, prompt, **options)[2] > GAP:
            return prompt
    raise AssertionError(f"every prompt of {length} tokens leads {family} to a near tie")


def prompts_of(family: str) -> list[tuple[int, ...]]:
    return [prompt_of(family, length) for length in LENGTHS]


def run(engine: Engine, before_step=None) -> None:
    """Until idle; an engine that makes no progress fails instead of running for ever."""
    for _ in range(MOST_STEPS):
        if engine.idle:
            return
        if before_step is not None:
            before_step(engine)
        engine.step()
    raise AssertionError(f"not idle after {MOST_STEPS} steps: {engine.scheduler.running} {engine.scheduler.waiting}")


def answers(engine: Engine, prompts, params=None, before_step=None) -> list[list[int]]:
    """Outputs of prompts that are submitted together; params for all, or for each."""
    each = params if isinstance(params, list) else [params or greedy()] * len(prompts)
    requests = [engine.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    run(engine, before_step)
    assert {request.error for request in requests} <= {None}
    assert_idle(engine)
    return [request.output for request in requests]


def assert_idle(engine: Engine) -> None:
    """Nothing runs, and nothing was lost or kept, but for what the prefix cache keeps."""
    assert engine.idle
    if engine.prefix is not None:
        engine.prefix.check()
        engine.prefix.clear()
        assert engine.prefix.states.used_slots == 0
        engine.prefix.states.check()
    engine.slots.check()
    engine.pages.check()
    assert (engine.slots.free_slots, engine.slots.used_slots) == (engine.slots.slots, 0)
    assert (engine.pages.free_pages, engine.pages.used_pages) == (engine.pages.pages, 0)
    assert not engine.runner.ringed
    assert not engine._listeners
    for x in _flat(engine.pages.arrays):
        assert not x[engine.pages.zeros * engine.pages.page_size :].any()


def poison(engine: Engine) -> None:
    """NaN into everything that no request owns: free slots and pages, dead records of rings, page rows behind the last
    token, the page for padding. Tables and last tokens of nobody lead astray."""
    slots, pages, runner = engine.slots, engine.pages, engine.runner
    live = {request.slot: request for request in engine.scheduler.running}
    for slot in set(range(slots.slots)) - set(live):
        for x in (slots.state, slots.conv, slots.folded_conv, slots.d, slots.k, slots.g):
            if x is not None:
                x[:, slot] = NAN
        slots.cursor[slot], runner.last_token[slot], runner.table[slot] = 77, 10**6, pages.trash
    used = set(pages._owners)
    for slot, request in live.items():
        runner.table[slot, request.synced :] = pages.trash
        if slots.d is not None and (dead := int(slots.cursor[slot])) < slots.ring_len:
            slots.d[:, slot, :, dead:] = NAN
            slots.k[:, slot, :, dead:] = NAN
            slots.g[:, slot, :, dead:] = NAN
        whole = request.computed // pages.page_size
        for page in request.pages[whole:]:
            first = page * pages.page_size + (request.computed % pages.page_size if page == request.pages[whole] else 0)
            _fill(pages, first, (page + 1) * pages.page_size)
    for page in (set(range(pages.pages)) | {pages.trash}) - used:
        _fill(pages, page * pages.page_size, (page + 1) * pages.page_size)
    if engine.prefix is not None:
        for slot in engine.prefix.states._free:
            engine.prefix.states.state[:, slot] = NAN
            engine.prefix.states.conv[:, slot] = NAN


def _fill(pages, first: int, end: int) -> None:
    for x in _flat(pages.arrays):
        x[first:end] = NAN


def _flat(arrays):
    return [x for layer in arrays for x in layer]
