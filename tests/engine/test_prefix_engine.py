"""The prefix cache in the engine: what it reuses, and that nobody can tell from the tokens."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.errors import OptionError
from replayssm.models.loading import load_model
from tests.engine import common

OPTIONS = {"prefix_cache": True, "prefix_interval": 8, "context": 256}


@functools.cache
def shipped():
    return load_model("gdn", device="cpu")


def answer(engine, prompt, tokens=9, family=common.SMALL):
    """Greedy tokens of one prompt, which must be those of stock decoding; returns the request."""
    request = engine.add(prompt, common.greedy(tokens, ignore_eos=True))
    common.run(engine)
    assert request.error is None
    assert request.output == common.stock(family, tuple(prompt), tokens)
    check(engine)
    return request


def check(engine):
    """The books at idle: what is in use is what is cached."""
    engine.prefix.check()
    for pool in (engine.slots, engine.pages, engine.prefix.states):
        pool.check()
    assert engine.slots.used_slots == 0
    assert engine.pages.used_pages == engine.prefix.cached_pages


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "glm5_next"])
@pytest.mark.parametrize("mode", ["replay", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 7},
        {"chunk_tokens": 13, "overlap": True, "prefix_strategy": "extra_buffer"},
        {"page_size": 3, "ring_len": 5, "prefix_interval": 9},
    ],
)
def test_a_chat_of_several_turns_equals_cold_runs(family, mode, options):
    with common.engine_of(family, states=100, **{**OPTIONS, "mode": mode, **options}) as engine:
        system = list(common.prompt_of(family, 40))
        chats = [system + [7 * i + 1, i + 2][: 1 + i % 2] for i in range(3)]
        before = [0] * len(chats)
        for turn in range(3):
            requests = [engine.add(chat, common.greedy(9, ignore_eos=True)) for chat in chats]
            common.run(engine)
            check(engine)
            for i, request in enumerate(requests):
                assert request.output == common.stock(family, tuple(chats[i]), 9)
                if turn:
                    assert request.cached_tokens >= before[i] - 1, "all of the turn before but its last token"
                chats[i] = chats[i] + request.output
                before[i] = len(chats[i])
                chats[i] = chats[i] + [(5 * turn + i) % 90 + 1] * (i % 3)
        assert engine.prefix.stats.hit > engine.prefix.stats.asked / 2


def test_replay_reuses_as_many_tokens_as_packed_decode():
    hits = []
    for mode in ("replay", "packed"):
        with common.engine_of(**OPTIONS, mode=mode) as engine:
            first = list(common.prompt_of(common.SMALL, 40))
            done = answer(engine, first)
            answer(engine, first)
            answer(engine, first + done.output + [3, 4])
            hits.append(dataclasses.asdict(engine.prefix.stats))
    assert hits[0] == hits[1]


@pytest.mark.parametrize("length", [1000, 961, 960, 1023])
def test_an_identical_prompt_reuses_all_to_the_last_multiple_of_the_interval(length):
    options = {"prefix_cache": True, "prefix_interval": 64, "context": 1100, "chunk_tokens": 300, "page_size": 16}
    with common.engine_of(shipped(), **options) as engine:
        prompt = common.random_tokens(length)
        params = common.greedy(20, ignore_eos=True)
        cold = engine.add(prompt, params)
        common.run(engine)
        again = engine.add(prompt, params)
        common.run(engine)
        longer = engine.add([*prompt, *cold.output], params)
        common.run(engine)
        check(engine)
    assert cold.cached_tokens == 0
    assert again.cached_tokens == (length - 1) // 64 * 64
    assert again.output == cold.output
    assert longer.cached_tokens == length + 20 - 1


def test_a_state_that_ends_within_a_page_is_copied_for_each_request():
    """A, A, B, A: four requests on one prefix whose last page is filled in part; B leaves it early."""
    with common.engine_of(**{**OPTIONS, "page_size": 16, "prefix_interval": 16}, states=20) as engine:
        base = list(common.prompt_of(common.SMALL, 31))
        done = answer(engine, base)
        longer = base + done.output
        for tail in ([5], [5], [6, 7, 8], [5]):
            assert answer(engine, longer + tail).cached_tokens >= len(longer) - 1


def test_outputs_of_one_prompt_share_what_was_cached():
    with common.engine_of(**OPTIONS) as engine:
        prompt = common.prompt_of(common.SMALL, 40)
        answer(engine, prompt)
        params = common.SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=9, ignore_eos=True)
        found = {}
        engine.submit(engine.make(prompt, params), lambda request, text: found.update({request.index: request}))
        common.run(engine)
        check(engine)
        warm = [found[i].output for i in range(3)]
        assert found[0].cached_tokens == 32
    with common.engine_of() as engine:
        cold = {}
        engine.submit(engine.make(prompt, params), lambda request, text: cold.update({request.index: request}))
        common.run(engine)
    assert warm == [cold[i].output for i in range(3)]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    order=st.lists(st.integers(0, 5), min_size=4, max_size=14),
    pages=st.sampled_from([30, 45, 80]),
    page_size=st.sampled_from([1, 4, 5]),
    preempt=st.sampled_from(["offload", "recompute"]),
    overlap=st.booleans(),
    abort=st.lists(st.booleans(), min_size=14, max_size=14),
    policy=st.sampled_from(["materialize", "truncate"]),
    strategy=st.sampled_from(["no_buffer", "extra_buffer"]),
)
def test_any_order_under_pressure_equals_cold_runs(order, pages, page_size, preempt, overlap, abort, policy, strategy):
    """Few pages and five cached states: everything is evicted at some time. Some requests are aborted on the way."""
    base = list(common.prompt_of(common.SMALL, 17))
    prompts = [base[:9], base, [*base, 1, 2, 3], [*base, 4], [9, *base[1:]], [*base[:8], 50, 51, 52]]
    options = {**OPTIONS, "page_size": page_size, "preempt": preempt, "overlap": overlap, "context": 32}
    options |= {"prefix_policy": policy, "prefix_strategy": strategy, "prefix_interval": 10 if page_size == 5 else 8}
    with common.engine_of(pages=max(pages // page_size, 2 * -(-32 // page_size)), **options) as engine:
        requests = []
        for which, ends in zip(order, abort, strict=False):
            request = engine.add(prompts[which], common.greedy(9, ignore_eos=True))
            requests.append((which, request))
            engine.step()
            if ends and len(requests) % 3 == 0:
                engine.abort(request)
        common.run(engine)
        check(engine)
        for which, request in requests:
            want = common.stock(common.SMALL, tuple(prompts[which]), 9)
            assert request.error is None
            assert request.output == want[: len(request.output)]
            assert len(request.output) == 9 or request.reason == "abort"
        engine.prefix.clear()
        assert engine.pages.free_pages == engine.pages.pages
        assert engine.prefix.states.free_slots == engine.prefix.states.slots


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_abort_by_another_request_leaves_a_state_of_its_tokens(at):
    """One request's listener aborts another of the same step, while the next one is on its way."""
    with common.engine_of(**OPTIONS, overlap=True) as engine:
        second = engine.make(common.prompt_of(common.SMALL, 31), common.greedy(9, ignore_eos=True))

        def listener(request, text):
            if len(request.output) == at:
                engine.abort(second)

        engine.add(common.prompt_of(common.SMALL, 40), common.greedy(9, ignore_eos=True), listener)
        engine.submit(second)
        common.run(engine)
        check(engine)
        assert len(second.output) == at
        answer(engine, [*second.prompt, *common.stock(common.SMALL, tuple(second.prompt), 9)[:at]])


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
@pytest.mark.parametrize("policy", ["materialize", "truncate"])
@pytest.mark.parametrize("slots", [1, 3])
def test_what_a_request_of_ten_and_twenty_tokens_leaves(family, policy, slots):
    """A ring of 16: the whole text but its last token, which was never computed, or what there was at the last fold."""
    options = {**OPTIONS, "prefix_policy": policy, "ring_len": 16, "prefix_interval": 64, "page_size": 4}
    with common.engine_of(family, **options) as engine:
        (slot,) = engine.slots.allocate(1) if slots > 1 else (None,)  # so that the phases of folds differ
        prompt = list(common.prompt_of(family, 10, tokens=20))
        first = engine.add(prompt, common.greedy(20, ignore_eos=True))
        cursors = []
        while not engine.idle:
            engine.step()
            cursors.append(int(engine.slots.cursor[max(first.slot, 0)]) if first.slot >= 0 else None)
        records = engine.runner.meter.fill.get(first.slot)
        assert records is None, "a slot that was given back holds nothing"
        assert first.output == common.stock(family, tuple(prompt), 20)
        left = 29 - (cursors[-2] + 1) % 16 if policy == "truncate" else 29
        assert left > 10
        if slot is not None:
            engine.slots.free([slot])
        text = prompt + first.output + [3, 4]
        again = engine.add(text, common.greedy(9, ignore_eos=True))
        common.run(engine)
        assert again.cached_tokens == left
        assert again.output == common.stock(family, tuple(text), 9)
        check(engine)


def test_buffers_come_from_the_cache_and_go_back():
    """Two for each request that runs, at most half of all; a snapshot takes one, and another comes in its place."""
    with common.engine_of(**OPTIONS, states=10, prefix_strategy="extra_buffer", max_requests=3) as engine:
        requests = [engine.add(common.prompt_of(common.SMALL, n), common.greedy(30)) for n in (31, 17, 13)]
        seen = set()
        while not engine.idle:
            engine.step()
            engine.prefix.check()
            held = [buffer for request in requests for buffer in request.buffers]
            assert len(held) == len(set(held)) == engine.prefix.reserved
            assert len(held) <= 5
            seen.add(len(held))
        assert 5 in seen
        assert engine.prefix.reserved == 0
        assert engine.prefix.stats.snapshots > 3
        check(engine)


def test_a_snapshot_with_a_buffer_evicts_nothing_first():
    with common.engine_of(**OPTIONS, states=4, prefix_strategy="extra_buffer", max_requests=1) as engine:
        answer(engine, common.prompt_of(common.SMALL, 13))
        evictions = []
        insert = engine.prefix.insert

        def watched(*args):
            before = engine.prefix.stats.states_evicted
            found = insert(*args)
            evictions.append(engine.prefix.stats.states_evicted - before)
            return found

        engine.prefix.insert = watched
        answer(engine, common.prompt_of(common.SMALL, 40))
        assert engine.prefix.stats.states_evicted > 0, "buffers are found between the snapshots"
        assert evictions
        assert not any(evictions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"prefix_interval": 10, "page_size": 4},
            "prefix_interval 10 is not a multiple of page_size 4; .* is 12",
        ),
        ({"prefix_share": 1e-9}, r"holds 0 states of .* needs at least 1; the smallest that works is 0\.001"),
        ({"prefix_share": 1e-9, "prefix_strategy": "extra_buffer"}, "needs at least 4"),
        ({"prefix_policy": "cut"}, "prefix_policy 'cut' is unknown; use one of materialize, truncate"),
        ({"prefix_strategy": "none"}, "prefix_strategy 'none' is unknown; use one of no_buffer, extra_buffer"),
    ],
)
def test_a_cache_that_cannot_work_is_refused_with_what_would(options, said):
    with pytest.raises(OptionError, match=said), common.engine_of(**{**OPTIONS, **options}):
        pass


def test_a_request_that_ends_before_its_first_fold_leaves_its_prompt():
    options = {**OPTIONS, "prefix_policy": "truncate", "ring_len": 16, "prefix_interval": 64, "page_size": 4}
    with common.engine_of(**options) as engine:
        prompt = list(common.prompt_of(common.SMALL, 17))  # in slot 0, which folds at multiples of 16
        done = engine.add(prompt, common.greedy(5, ignore_eos=True))
        engine.step()
        engine.prefix.clear()  # of the state at the prompt's end, which is the same
        common.run(engine)
        text = prompt + done.output
        assert answer(engine, [*text, 3, 4]).cached_tokens == 17
