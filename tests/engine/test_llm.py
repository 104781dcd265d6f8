"""`LLM` and `AsyncLLM`: order, refusals before anything runs, streams that do not hinder each other, clean ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from itertools import pairwise

import pytest

from replayssm.engine.llm import LLM, AsyncLLM, engine_options
from replayssm.engine.params import SamplingParams
from replayssm.errors import OptionError, PromptError, ReplayError
from tests.engine.common import (
    LENGTHS,
    OPTIONS,
    SMALL,
    TOKENS,
    assert_idle,
    greedy,
    loaded_of,
    prompt_of,
    prompts_of,
    random_tokens,
    stock,
    with_pages,
)

PATIENCE = 60  # seconds until a reader that waits in vain is a failure


@contextlib.contextmanager
def llm_of(kind=LLM, pages=None, **options):
    with with_pages(pages):
        llm = kind(loaded_of(), **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.close()


def still_works(llm):
    """After whatever happened: nothing is left of it."""
    assert_idle(llm.engine)
    (found,) = llm.generate(prompt_of(SMALL, 8), greedy())
    assert list(found.token_ids) == stock(SMALL, prompt_of(SMALL, 8))
    assert_idle(llm.engine)


def test_results_come_in_the_order_of_the_prompts(capsys):
    prompts = prompts_of(SMALL)[::-1]
    tokens = [1 + 5 * i % TOKENS for i in range(len(prompts))]
    with llm_of() as llm:
        found = llm.generate(prompts, [greedy(n) for n in tokens], progress=True)
        one = llm.generate(prompts[0], greedy(2))
        generated = llm.generate((list(prompt) for prompt in prompts[:2]), greedy(2))
        assert llm.generate([]) == []
    assert [result.prompt_token_ids for result in found] == prompts
    assert [list(result.token_ids) for result in found] == [
        stock(SMALL, prompt)[:n] for prompt, n in zip(prompts, tokens, strict=True)
    ]
    assert [result.finish_reason for result in found] == ["length"] * len(prompts)
    assert one[0].token_ids == generated[0].token_ids == tuple(stock(SMALL, prompts[0])[:2])
    assert capsys.readouterr().out == ""
    for result in found:
        assert 0 < result.outputs[0].ttft <= result.outputs[0].seconds


GOOD = random_tokens(5)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "said"),
    [
        ([GOOD, []], None, PromptError, "prompt 1: the prompt is empty"),
        ([[]], None, PromptError, "^the prompt is empty"),
        ([GOOD, random_tokens(96)], None, PromptError, "prompt 1: the prompt has 96 tokens .* a context of 96"),
        ([GOOD, random_tokens(45)], greedy(40), PromptError,
         "prompt 1: 45 prompt tokens and up to 40 more need 22 pages of 4 tokens, all there are is 20"),
        ([random_tokens(45)], greedy(40), PromptError, "45 prompt tokens and up to 40 more need 22 pages"),
        ([[3, 97]], None, PromptError, "prompt token 97 is outside 0…96"),
        ([[3, -1]], None, PromptError, "prompt token -1 is outside 0…96"),
        ([[3, 4.5]], None, PromptError, "a prompt is a text or whole numbers"),
        ([GOOD, GOOD], [greedy()], OptionError, "2 prompts, but 1 sets of parameters"),
        ([GOOD], (), OptionError, "1 prompts, but 0 sets"),
        ([GOOD, GOOD], [greedy(), greedy(stop=("x",))], OptionError, "prompt 1: stop .* needs a tokenizer"),
        ([GOOD], greedy(stop_token_ids=(97,)), OptionError, "stop_token_ids names token 97"),
        ([GOOD], greedy(logit_bias={400: 1.0}), OptionError, "logit_bias names token 400"),
        ([GOOD], SamplingParams(top_k=98), OptionError, "top_k 98"),
        ("words", None, OptionError, "needs a tokenizer"),
        ([GOOD, "words"], None, OptionError, "prompt 1: a prompt in words needs a tokenizer"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_does(prompts, params, error, said):
    with llm_of(pages=20) as llm:
        params = greedy() if params is None else params
        with pytest.raises(error, match=said):
            llm.generate(prompts, params)
        assert llm.engine.steps == 0
        still_works(llm)


def test_drafts_are_counted_for_each_output():
    prompts = prompts_of(SMALL)[:3]
    params = [greedy(), SamplingParams(temperature=0.5, n=2, seed=1, max_tokens=TOKENS), greedy()]
    with llm_of() as llm:
        plain = llm.generate(prompts, params)
    assert {(one.drafted, one.drafts_kept) for one in plain} == {(0, 0)}
    with llm_of(spec="ngram", spec_tokens=2, spec_adaptive=False, ring_len=8) as llm:
        truths = {tuple(p): [list(one.token_ids) for one in out.outputs] for p, out in zip(prompts, plain, strict=True)}

        def propose(requests, most):
            """The first draft is right, the second wrong."""
            found = []
            for request, count in zip(requests, most, strict=True):
                truth = truths[tuple(request.prompt)][request.index][len(request.output) :]
                found.append([truth[0], (truth[1] + 1) % 80][:count] if count else [])
            return found

        llm.engine.drafter.propose = propose
        found = llm.generate(prompts, params)
        stats = llm.engine.stats
    for output, before in zip(found, plain, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in before.outputs]
        for one in output.outputs:
            assert one.drafts_kept in (TOKENS // 2 - 1, TOKENS // 2)  # a step gives two tokens
            assert one.drafts_kept < one.drafted <= 2 * one.drafts_kept
        assert output.drafted == sum(one.drafted for one in output.outputs)
        assert output.drafts_kept == sum(one.drafts_kept for one in output.outputs)
    assert stats.drafted == sum(one.drafted for one in found)
    assert stats.drafts_kept == sum(one.drafts_kept for one in found)


def test_options_that_do_not_exist_are_named():
    with pytest.raises(OptionError, match="unknown option 'ring'; an engine has ring_len, "):
        LLM(loaded_of(), ring=3)
    for options, said in (({"mode": "fast"}, "'fast'"), ({"preempt": "drop"}, "'drop'"), ({"chunk_tokens": 1}, "1"),
                          ({"context": 513}, "context 513 exceeds the model's 512")):  # fmt: skip
        with pytest.raises(ReplayError, match=said):
            LLM(loaded_of(), **options)
    with llm_of() as llm:
        still_works(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["schedule", "decode", "prefill", "sample", "collect", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_breaks_off_leaves_nothing_behind(overlap, where, error):
    """Behind the call that it interrupts; the engine is idle then, and what it kept for later prompts is right."""
    prompts = [prompt_of(SMALL, length) for length in (1, 5, 13, 17)]
    with llm_of(pages=20, overlap=overlap, chunk_tokens=7, prefix_cache=True, prefix_interval=4) as llm:
        engine = llm.engine
        owner, name = {
            "schedule": (engine.scheduler, "schedule"), "decode": (engine.runner, "_decode"),
            "prefill": (engine.runner, "_prefill"), "sample": (engine.runner, "_sample"),
            "collect": (engine, "_append"), "after": (engine, "step"),
        }[where]  # fmt: skip
        whole, left = getattr(owner, name), [0]

        def broken(*args):
            found = whole(*args)
            left[0] -= 1
            if left[0] == -1:
                raise error("now")
            return found

        for at in (0, 3):
            left[0] = at
            setattr(owner, name, broken)
            if error is KeyboardInterrupt or where in ("schedule", "after"):
                with pytest.raises(error):
                    llm.generate(prompts, greedy())
            else:
                reasons = {result.finish_reason for result in llm.generate(prompts, greedy())}
                assert "error" in reasons
            setattr(owner, name, whole)
            assert engine.idle
            longer = [(*prompt, *stock(SMALL, prompt)[:5]) for prompt in prompts]
            found = llm.generate(longer, greedy(5))
            assert [list(one.token_ids) for one in found] == [stock(SMALL, prompt)[5:10] for prompt in prompts]
            still_works(llm)


def test_one_failing_request_is_reported_and_the_others_go_on():
    with llm_of(max_requests=3) as llm:
        accept, prompts = llm.engine._append, prompts_of(SMALL)

        def failing(request, token, logprob, now):
            if request.prompt == list(prompts[4]) and len(request.output) == 3:
                raise ValueError("bad luck")
            return accept(request, token, logprob, now)

        llm.engine._append = failing
        found = llm.generate(prompts, greedy())
        llm.engine._append = accept
        for i, (result, prompt) in enumerate(zip(found, prompts, strict=True)):
            (one,) = result.outputs
            want = stock(SMALL, prompt)
            if i == 4:
                assert (one.finish_reason, one.error) == ("error", "ValueError: bad luck")
                assert list(one.token_ids) == want[:3]
            else:
                assert (one.finish_reason, list(one.token_ids)) == ("length", want)
        still_works(llm)


def test_leaving_gives_the_model_back():
    with LLM(loaded_of(), **OPTIONS) as llm:
        still_works(llm)
    with LLM(loaded_of(), **OPTIONS) as llm:
        still_works(llm)


# Streams.


def with_streams(work, **options):
    """Run `work(llm)` on an engine in its own thread; whatever hangs fails."""
    with llm_of(AsyncLLM, **options) as llm:
        asyncio.run(asyncio.wait_for(work(llm), PATIENCE))
        return llm


async def until_idle(llm):
    while not (llm.engine.idle and not llm._inbox):
        await asyncio.sleep(0.005)
    assert_idle(llm.engine)
    assert not llm._streams


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_say_what_generate_says(overlap):
    params = [greedy(1 + 3 * i % TOKENS) for i in range(len(LENGTHS))]
    sampled = SamplingParams(seed=4, max_tokens=9, n=3)
    with llm_of() as llm:
        want = [*llm.generate(prompts_of(SMALL), params), *llm.generate(GOOD, sampled)]

    async def work(llm):
        async def read(prompt, one):
            seen = [output async for output in llm.stream(prompt, one)]
            for before, after in pairwise(seen):
                for old, new in zip(before.outputs, after.outputs, strict=False):
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
            return seen

        streams = [read(*each) for each in zip(prompts_of(SMALL), params, strict=True)]
        found = await asyncio.gather(*streams, read(GOOD, sampled))
        for seen, result in zip(found, want, strict=True):
            last = seen[-1]
            assert [one.token_ids for one in last.outputs] == [one.token_ids for one in result.outputs]
            assert {one.finish_reason for one in last.outputs} == {"length"}
            assert all(one.finish_reason is None for output in seen[:1] for one in output.outputs[1:])
        again = await llm.generate(prompts_of(SMALL)[2], params[2])
        assert again.token_ids == want[2].token_ids
        with pytest.raises(PromptError, match="empty"):
            await llm.generate([])
        await until_idle(llm)

    with_streams(work, overlap=overlap)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("leave", ["break", "cancel"])
def test_leaving_a_stream_early_frees_its_slot(n, leave):
    params = SamplingParams(seed=1, max_tokens=80, n=n)

    async def work(llm):
        async def read():
            async with contextlib.aclosing(llm.stream(GOOD, params)) as stream:
                async for output in stream:
                    if leave == "break" and len(output.token_ids) >= 2:
                        return

        step, submit, begun = llm.engine.step, llm.engine.submit, []

        def slow():
            time.sleep(0.003)  # the readers have time to leave
            step()

        llm.engine.step = slow
        llm.engine.submit = lambda request, listener: (begun.append(request), submit(request, listener))
        tasks = [asyncio.create_task(read()) for _ in range(7)]  # more than there are slots
        if leave == "cancel":
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        roots = list(begun)
        found = await llm.generate(prompt_of(SMALL, 8), greedy())
        assert list(found.token_ids) == stock(SMALL, prompt_of(SMALL, 8))
        await until_idle(llm)
        assert {root.reason for root in roots} == {"abort"}

    with_streams(work)


def test_a_reader_that_does_not_read_holds_up_nobody():
    async def work(llm):
        slow = llm.stream(GOOD, SamplingParams(seed=1, max_tokens=60))
        await anext(slow)
        for _ in range(2):
            found = await llm.generate(prompt_of(SMALL, 8), greedy())
            assert list(found.token_ids) == stock(SMALL, prompt_of(SMALL, 8))
        while not llm.engine.idle:  # what nobody reads is decoded, too
            await asyncio.sleep(0.005)
        rest = [output async for output in slow]
        assert len(rest) <= 2  # all of it at once
        assert len(rest[-1].token_ids) == 60
        await until_idle(llm)

    with_streams(work, max_requests=1)


def test_closing_ends_the_readers():
    async def work(llm):
        first = asyncio.Event()

        async def read():
            async for _ in llm.stream(GOOD, SamplingParams(seed=1, max_tokens=90)):
                first.set()

        tasks = [asyncio.create_task(read()) for _ in range(6)]
        await first.wait()
        await asyncio.to_thread(llm.close)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, RuntimeError)
            assert "closed" in str(found)
        with pytest.raises(RuntimeError, match="closed"):
            await llm.generate(GOOD)
        assert_idle(llm.engine)
        assert not llm._thread.is_alive()
        assert not llm._streams

    with_streams(work)


def test_a_result_that_was_ready_survives_the_closing():
    async def work(llm):
        stream = llm.stream(prompt_of(SMALL, 8), greedy())
        await anext(stream)
        while not llm.engine.idle:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(llm.close)
        rest = [output async for output in stream]
        assert list(rest[-1].token_ids) == stock(SMALL, prompt_of(SMALL, 8))

    with_streams(work)


def test_a_failure_of_the_engine_reaches_every_reader():
    async def work(llm):
        schedule, left = llm.engine.scheduler.schedule, [5]

        def failing():
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("no more")
            return schedule()

        llm.engine.scheduler.schedule = failing
        reads = [llm.generate(prompt_of(SMALL, length), greedy()) for length in LENGTHS]
        for found in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(found, RuntimeError)
            assert "the engine stopped" in str(found)
            assert isinstance(found.__cause__, MemoryError)
        with pytest.raises(RuntimeError, match="the engine stopped"):
            await llm.generate(GOOD)

    with_streams(work)


def test_a_root_that_fails_does_not_end_its_forks():
    """The last thing that a stream says has the reasons of all outputs."""

    async def work(llm):
        accept = llm.engine._append

        def failing(request, token, logprob, now):
            if request.index == 0 and len(request.output) == 2:
                raise ValueError("bad luck")
            return accept(request, token, logprob, now)

        llm.engine._append = failing
        found = await llm.generate(GOOD, SamplingParams(seed=1, max_tokens=12, n=3))
        assert [one.finish_reason for one in found.outputs] == ["error", "length", "length"]
        assert [len(one.token_ids) for one in found.outputs] == [2, 12, 12]
        await until_idle(llm)

    with_streams(work)


def test_readers_in_two_threads():
    """Each with an event loop of its own, on one engine."""
    found, prompts = {}, prompts_of(SMALL)

    def reader(llm, which):
        async def work():
            outputs = await asyncio.gather(*(llm.generate(prompt, greedy()) for prompt in prompts[which::2]))
            found[which] = [list(output.token_ids) for output in outputs]

        asyncio.run(asyncio.wait_for(work(), PATIENCE))

    with llm_of(AsyncLLM, max_requests=3) as llm:
        threads = [threading.Thread(target=reader, args=(llm, which)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for which in (0, 1):
        assert found[which] == [stock(SMALL, prompt) for prompt in prompts[which::2]]


@pytest.mark.parametrize(
    ("options", "ring_len"),
    [
        ({}, 8),
        ({"spec": "ngram"}, 16),
        ({"spec": "ngram", "spec_tokens": 1}, 8),
        ({"spec": "ngram", "spec_tokens": 8}, 32),
        ({"spec": "ngram", "ring_len": 6}, 6),
        ({"spec": "ngram", "spec_state": "fold"}, 8),
    ],
)
def test_a_ring_of_windows_holds_three_of_them_unless_told(options, ring_len):
    assert engine_options(options).ring_len == ring_len


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_wrong_number_of_drafts_is_refused_by_its_name(tokens):
    with pytest.raises(OptionError, match="spec_tokens"):
        engine_options({"spec": "ngram", "spec_tokens": tokens})
