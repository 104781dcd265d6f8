"""Greedy tokens equal those of stock decoding, one prompt at a time, however an engine comes to them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import enable, ops
from replayssm.engine.core import Engine
from replayssm.engine.graphs import DecodeInputs
from replayssm.engine.options import EngineOptions
from replayssm.errors import MemoryBudgetError, UnsupportedModelError
from tests.engine.common import (
    FAMILIES,
    LENGTHS,
    NAN,
    OPTIONS,
    SMALL,
    TOKENS,
    answers,
    assert_idle,
    engine_of,
    greedy,
    loaded_of,
    poison,
    prompt_of,
    prompts_of,
    run,
    stock,
)

ARRIVALS = st.lists(  # steps before it, which prompt, tokens of the answer
    st.tuples(st.integers(0, 4), st.sampled_from(LENGTHS), st.integers(1, TOKENS)), min_size=1, max_size=7
)
OPTION = dict(
    chunk_tokens=st.sampled_from([2, 3, 7, 16, 64]), page_size=st.sampled_from([1, 3, 4, 16]),
    ring_len=st.sampled_from([1, 2, 4, 8]), mode=st.sampled_from(["auto", "replay", "packed"]),
    max_requests=st.integers(1, 5), overlap=st.booleans(), preempt=st.sampled_from(["offload", "recompute"]),
    snapshot_interval=st.sampled_from([0, 0, 1, 3, 8]), prefix_cache=st.booleans(),
    prefix_interval=st.sampled_from([1, 2, 5]), prefix_policy=st.sampled_from(["materialize", "truncate"]),
    prefix_strategy=st.sampled_from(["no_buffer", "extra_buffer"]),
)  # fmt: skip
SITUATION = st.fixed_dictionaries(OPTION)
FEW, SOME, MANY = 5, 10, 25  # examples: for most families, for the other kind of decay, for the quickest one
NEVER_ENOUGH = st.sampled_from([1.0, 1.3, 2.0, 10.0])  # pages, as a multiple of what the longest request needs


def by_rows(state, ring_len, rows, is_kda):
    """As on a GPU: a batch of another size may decode another way."""
    return "replay" if rows > 1 else "packed"


def check_any_way(family, arrivals, options, share, gathered):
    size = options["page_size"]
    options = {**options, "prefix_interval": size * options["prefix_interval"]}
    longest = max(-(-(length + tokens) // size) for _, length, tokens in arrivals)
    pages = min(int(longest * share), options["max_requests"] * -(-OPTIONS["context"] // size))
    with engine_of(family, pages, **options) as engine, patch.object(ops, "decode_route", by_rows):
        if gathered is not None:
            engine.runner.gathered_tokens = gathered
        requests = []
        for steps, length, tokens in arrivals:
            for _ in range(steps):
                poison(engine)
                engine.step()
            requests.append(engine.add(prompt_of(family, length), greedy(tokens)))
        run(engine, poison)
        for request, (_, length, tokens) in zip(requests, arrivals, strict=True):
            assert request.error is None
            assert request.reason == "length"
            assert request.output == stock(family, prompt_of(family, length))[:tokens]
        assert_idle(engine)


def any_way(examples):
    """What nobody owns is NaN before every step."""
    given_all = given(
        arrivals=ARRIVALS, options=SITUATION, share=NEVER_ENOUGH, gathered=st.sampled_from([None, None, 64, 150])
    )
    return lambda test: settings(max_examples=examples, deadline=None, derandomize=True)(given_all(test))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (SMALL, "kimi_linear")])
@any_way(FEW)
def test_tokens_are_those_of_stock_decoding(family, arrivals, options, share, gathered):
    check_any_way(family, arrivals, options, share, gathered)


@any_way(SOME)
def test_tokens_are_those_of_stock_decoding_with_a_decay_per_channel(arrivals, options, share, gathered):
    check_any_way("kimi_linear", arrivals, options, share, gathered)


@any_way(MANY)
def test_tokens_are_those_of_stock_decoding_in_many_ways(arrivals, options, share, gathered):
    check_any_way(SMALL, arrivals, options, share, gathered)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("preempt", "overlap"), [("offload", True), ("recompute", False)])
def test_preempted_requests_go_on_as_if_nothing_had_happened(family, preempt, overlap):
    """Two requests fit, four run."""
    prompts = [prompt_of(family, length) for length in (13, 8, 17, 5)]
    with engine_of(family, 16, preempt=preempt, overlap=overlap, chunk_tokens=7) as engine:
        requests = [engine.add(prompt, greedy()) for prompt in prompts]
        run(engine, poison)
        assert sum(request.preemptions for request in requests) >= 2
        assert requests[0].preemptions == 0  # the eldest never makes room
        assert [request.output for request in requests] == [stock(family, prompt) for prompt in prompts]
        assert_idle(engine)


@pytest.mark.parametrize("preempt", ["offload", "recompute"])
@pytest.mark.parametrize("step", range(1, 12))
def test_a_request_may_be_preempted_at_any_step(preempt, step):
    """In a prompt, at its end, and at every place of the ring."""
    prompt = prompt_of(SMALL, 17)
    with engine_of(preempt=preempt, chunk_tokens=7) as engine:
        request = engine.add(prompt, greedy())
        for _ in range(step):
            engine.step()
        engine.scheduler._evict(request)
        assert request.pages == []
        assert engine.slots.used_slots == engine.pages.used_pages == 0
        other = engine.add(prompt_of(SMALL, 8), greedy())  # takes the slot
        run(engine, poison)
        assert request.output == stock(SMALL, prompt)
        assert other.output == stock(SMALL, prompt_of(SMALL, 8))
        assert_idle(engine)


def test_what_a_dead_request_left_reaches_nobody():
    """The same answers from an engine that has run others, with or without NaN where those were."""
    prompts = prompts_of(SMALL)
    with engine_of(mode="replay") as engine:
        fresh = answers(engine, prompts)
        assert fresh == [stock(SMALL, prompt) for prompt in prompts]
        assert answers(engine, prompts[::-1]) == fresh[::-1]
        assert answers(engine, prompts, before_step=poison) == fresh


def test_a_request_that_ends_while_its_next_step_fails_leaves_no_wrong_state():
    """Its last token was in flight, and the step that failed has moved its state beyond it."""
    prompt = prompt_of(SMALL, 13)
    want = stock(SMALL, prompt)
    last = next(i for i in range(1, 9) if want[i] not in want[:i] and (13 + i) % OPTIONS["page_size"])
    with engine_of(overlap=True, prefix_cache=True, prefix_interval=64) as engine:
        decode, calls = engine.runner._decode, []

        def broken(part):
            logits = decode(part)
            if calls.append(part) or len(calls) == last + 1:
                raise RuntimeError("now")
            return logits

        engine.runner._decode = broken
        request = engine.add(prompt, greedy(stop_token_ids=(want[last],)))
        run(engine)
        assert (request.reason, request.output) == ("stop", want[: last + 1])
        assert len(calls) == last + 1
        other = engine.add((*prompt, *want[:10]), greedy(6))
        run(engine)
        assert other.output == want[10:]
        assert other.cached_tokens >= 13
        assert_idle(engine)


def test_a_prefix_that_takes_the_whole_pool_is_not_waited_for():
    """A state in mid-page costs a page more than the request alone."""
    prompt = prompt_of(SMALL, 13)
    want = stock(SMALL, prompt)
    with engine_of(pages=5, prefix_cache=True, prefix_interval=64, max_requests=1) as engine:
        assert answers_keeping(engine, prompt, 6) == want[:6]
        assert engine.pages.free_pages == 0
        assert answers_keeping(engine, (*prompt, *want[:6]), 1) == want[6:7]
        assert_idle(engine)


def answers_keeping(engine, prompt, tokens):
    request = engine.add(prompt, greedy(tokens))
    run(engine)
    return request.output


def test_a_small_memory_holds_four_times_as_many_requests_as_fit():
    """By the plan itself: what it does not hold waits, and is preempted."""
    prompts = prompts_of(SMALL)
    memory = 2**30
    for _ in range(2):  # work grows with the memory that there is for it
        with engine_of(max_requests=2, chunk_tokens=8, memory=memory) as engine:
            plan = engine.plan
        memory = plan.weights + plan.work + 2 * plan.slot_bytes + 20 * plan.page_bytes
    with engine_of(max_requests=2, chunk_tokens=8, memory=memory) as engine:
        assert engine.plan.used <= memory
        assert engine.plan.pages == 18
        pools = engine.slots.nbytes + engine.pages.nbytes
        assert pools == engine.plan.used - engine.plan.weights - engine.plan.work
        requests = [engine.add(prompt, greedy()) for prompt in prompts]
        run(engine)
        assert [request.output for request in requests] == [stock(SMALL, prompt) for prompt in prompts]
        assert sum(request.preemptions for request in requests) > 0
        assert_idle(engine)
    with pytest.raises(MemoryBudgetError, match="does not hold weights"), engine_of(memory=plan.weights + 1000):
        pass


def test_a_model_whose_attention_runs_row_by_row_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"qwen4_exp.*enable and model.generate\(\) work"):
        Engine(loaded_of("qwen4_exp_text"), EngineOptions(memory=2**30))
    handle = enable(loaded_of("qwen4_exp_text").model)  # what was begun is undone
    handle.disable()


def test_a_closed_engine_leaves_the_model_as_it_was():
    model = loaded_of().model
    before = model.config._attn_implementation, {name: x.clone() for name, x in model.named_parameters()}
    prompt = prompt_of(SMALL, 8)
    with engine_of() as engine:
        answers(engine, [prompt])
    assert model.config._attn_implementation == before[0]
    assert all(bool((x == before[1][name]).all()) for name, x in model.named_parameters())
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    assert out[0, 8:].tolist() == stock(SMALL, prompt)


class OneBuffer:
    """Stands for CUDA graphs: a bucket of rows, padded, whose logits are always written to the same place."""

    def __init__(self, runner, rows=3):
        self.runner, self.rows = runner, rows
        self.logits = torch.full((rows, runner.vocabulary), NAN)

    def bucket(self, rows):
        return self.rows

    def pages(self, pages):
        return pages

    def run(self, inputs, pages, route):
        held = DecodeInputs.padding(self.rows, inputs.slots.device)
        for mine, theirs in zip(held, inputs, strict=True):
            mine[: len(theirs)] = theirs
        self.logits.copy_(self.runner.decode_forward(held, pages, route))
        return self.logits[: len(inputs.slots)]


@pytest.mark.parametrize("mode", ["replay", "packed"])
def test_parts_of_a_step_may_come_from_one_graph(mode):
    """Contexts that are too much together run one part after the other, and a graph overwrites its own logits."""
    prompts = [prompt_of(SMALL, length) for length in (17, 31, 40, 13)]
    with engine_of(mode=mode, chunk_tokens=200) as engine:
        runner, parts = engine.runner, set()
        runner.graphs, runner.gathered_tokens = OneBuffer(runner), 130
        split = runner._parts

        def counted(requests):
            found = split(requests)
            parts.add(len(found))
            return found

        runner._parts = counted
        requests = [engine.add(prompt, greedy()) for prompt in prompts]
        run(engine)
        assert max(parts) > 1
        assert [request.output for request in requests] == [stock(SMALL, prompt) for prompt in prompts]
