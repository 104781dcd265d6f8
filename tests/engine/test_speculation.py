"""Speculation: whatever is drafted, and however states are rolled back, the tokens are those of one-by-one decoding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from replayssm.engine.core import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.pace import DraftPace
from replayssm.engine.params import SamplingParams
from replayssm.errors import ModelFilesError, OptionError, UnsupportedModelError
from replayssm.models.loading import load_model
from replayssm.models.mtp import MTPHead, load_mtp
from tests.engine import common
from tests.engine.common import SMALL, TOKENS, greedy, poison, prompt_of, stock
from tests.models import tiny

STATES = ("ring", "snapshot", "kv-replay", "fold")
OPTIONS = {"spec": "ngram", "spec_tokens": 3, "spec_adaptive": False, "ring_len": 8}
VOCABULARY = 80


class Scripted:
    """Drafts of which so many are right as a script says, request by request; None for no draft at all."""

    def __init__(self, truths, script):
        self.truths, self.script = truths, script
        self.at: dict[object, itertools.cycle] = {}
        self.windows = []

    def propose(self, requests, most):
        found = []
        for request, count in zip(requests, most, strict=True):
            right = next(self.at.setdefault(request, itertools.cycle(self.script)))
            if right is None or not count:
                found.append([])
                continue
            truth = self.truths[tuple(request.prompt)][len(request.output) :]
            drafts = truth[: min(right, count)]
            if len(drafts) < count:  # one that is wrong, and what might follow it
                wrong = truth[len(drafts)] + 1 if len(drafts) < len(truth) else 0
                drafts = [*drafts, *[wrong % VOCABULARY] * (count - len(drafts))]
            found.append(drafts)
            self.windows.append(min(right, count))
        return found

    def follow(self, request, kept):
        assert kept >= 1

    def forget(self, request):
        self.at.pop(request, None)


def scripted(engine, family, prompts, script, tokens=TOKENS):
    truths = {tuple(prompt): stock(family, tuple(prompt), tokens) for prompt in prompts}
    engine.drafter = Scripted(truths, script)
    return engine.drafter


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", common.FAMILIES)
def test_tokens_are_those_of_stock_decoding(family, state):
    """Rows that accept 0, 1, 2, all, or have no draft, each at a phase of its own; prompts and decode mixed."""
    prompts = common.prompts_of(family)
    with common.engine_of(family, **OPTIONS, spec_state=state, chunk_tokens=13, pages=60) as engine:
        drafter = scripted(engine, family, prompts, [0, None, 3, 1, None, None, 2, 3, 0, 0])
        assert common.answers(engine, prompts, before_step=poison) == [stock(family, prompt) for prompt in prompts]
        assert {0, 1, 2, 3} == set(drafter.windows)
        assert engine.stats.drafts_kept > 10


SCRIPT = st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=1, max_size=6)
WAYS = st.fixed_dictionaries(
    dict(
        spec_state=st.sampled_from(STATES), ring_len=st.sampled_from([5, 6, 8, 16]), spec_tokens=st.integers(1, 3),
        chunk_tokens=st.sampled_from([2, 7, 64]), page_size=st.sampled_from([1, 3, 4, 16]),
        max_requests=st.integers(1, 4), preempt=st.sampled_from(["offload", "recompute"]), prefix_cache=st.booleans(),
        prefix_strategy=st.sampled_from(["no_buffer", "extra_buffer"]), mode=st.sampled_from(["auto", "replay"]),
    )
)  # fmt: skip
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(common.LENGTHS), st.integers(1, TOKENS)), min_size=1, max_size=6
)


def check_any_way(family, script, options, arrivals, share):
    size = options["page_size"]
    longest = max(-(-(length + tokens) // size) for _, length, tokens in arrivals)
    pages = min(int(longest * share), options["max_requests"] * -(-common.OPTIONS["context"] // size))
    options = {**OPTIONS, "prefix_interval": size * 2, **options}
    with common.engine_of(family, pages, **options) as engine:
        scripted(engine, family, [prompt_of(family, length) for _, length, _ in arrivals], script)
        requests = []
        for steps, length, tokens in arrivals:
            for _ in range(steps):
                poison(engine)
                engine.step()
            requests.append(engine.add(prompt_of(family, length), greedy(tokens)))
        common.run(engine, poison)
        for request, (_, length, tokens) in zip(requests, arrivals, strict=True):
            assert request.error is None
            assert request.output == stock(family, prompt_of(family, length))[:tokens]
        common.assert_idle(engine)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(script=SCRIPT, options=WAYS, arrivals=ARRIVALS, share=st.sampled_from([1.0, 1.3, 2.0, 10.0]))
def test_any_way_with_one_decay_per_head(script, options, arrivals, share):
    check_any_way(SMALL, script, options, arrivals, share)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(script=SCRIPT, options=WAYS, arrivals=ARRIVALS, share=st.sampled_from([1.0, 1.3, 2.0, 10.0]))
def test_any_way_with_a_decay_per_channel(script, options, arrivals, share):
    check_any_way("kimi_linear", script, options, arrivals, share)


@pytest.mark.parametrize("state", STATES)
def test_a_request_that_ends_within_a_window_leaves_the_state_of_its_text(state):
    """By a stop token, by its length: the next turn takes over all but the last token, and goes on as if alone."""
    prompt = prompt_of(SMALL, 17)
    truth = stock(SMALL, prompt)
    for end in range(2, 8):
        if truth[end] in truth[:end]:
            continue
        for params in (greedy(TOKENS, stop_token_ids=(truth[end],)), greedy(end + 1)):
            options = {**OPTIONS, "prefix_cache": True, "prefix_interval": 16, "context": 128}
            with common.engine_of(SMALL, states=50, **options, spec_state=state) as engine:
                scripted(engine, SMALL, [prompt], [3])
                first = engine.add(prompt, params)
                common.run(engine)
                assert first.output == truth[: end + 1]
                text = [*prompt, *first.output, 5, 6]
                scripted(engine, SMALL, [text], [3, 0], 9)
                again = engine.add(text, greedy(9))
                common.run(engine)
                assert again.cached_tokens == len(prompt) + end
                assert again.output == stock(SMALL, tuple(text), 9)
                engine.prefix.check()


@pytest.mark.parametrize("state", STATES)
def test_sampled_tokens_are_those_without_drafts(state):
    """Noise belongs to a position, so a draft is right exactly when it is what would have been drawn."""
    prompts = common.prompts_of(SMALL)[:5]
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=TOKENS) for i in range(5)]
    with common.engine_of() as engine:
        want = common.answers(engine, prompts, params)
    with common.engine_of(**OPTIONS, spec_state=state) as engine:
        drafter = engine.drafter = Scripted(
            {tuple(p): w for p, w in zip(prompts, want, strict=True)}, [0, 3, 1, None, 2]
        )
        assert common.answers(engine, prompts, params) == want
        assert engine.stats.drafts_kept > 10
        assert 3 in drafter.windows


def test_logprobs_are_those_without_drafts():
    prompt = prompt_of(SMALL, 13)
    found = []
    for options in ({}, OPTIONS):
        with common.engine_of(**options) as engine:
            if options:
                scripted(engine, SMALL, [prompt], [3, 1])
            request = engine.add(prompt, greedy(logprobs=2))
            common.run(engine)
            assert len(request.logprobs) == len(request.output) == TOKENS
            found.append(request.logprobs)
    for one, other in zip(*found, strict=True):
        assert one.token == other.token
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "params", [greedy(repetition_penalty=1.3), greedy(presence_penalty=0.5, min_tokens=4), greedy(min_tokens=9)]
)
def test_parameters_that_depend_on_the_text_stay_right(params):
    prompts = common.prompts_of(SMALL)
    with common.engine_of() as engine:
        want = common.answers(engine, prompts, params)
    with common.engine_of(**OPTIONS) as engine:
        engine.drafter = Scripted({tuple(p): w for p, w in zip(prompts, want, strict=True)}, [3, 0, 1])
        assert common.answers(engine, prompts, params) == want


LONG, LONG_PROMPT = 4096, list(range(1, 20))


@functools.cache
def long_run(family, state=None):
    """4096 sampled tokens of one request, and the state that is left: plain, or with drafts accepted at random."""
    model = deepcopy(tiny.model_of(family))
    model.config.max_position_embeddings = 4200
    options = {"context": 4200, "page_size": 64, "max_requests": 1, "mode": "packed"}
    if state is not None:
        options |= {**OPTIONS, "mode": "auto", "spec_state": state, "spec_tokens": 4}
    left = {}
    with common.engine_of(common.as_loaded(model), **options) as engine:
        if state is not None:
            script = torch.randint(0, 5, (997,), generator=torch.Generator().manual_seed(1)).tolist()
            engine.drafter = Scripted({tuple(LONG_PROMPT): long_run(family)[0]}, script)
        finish = engine._finish

        def hold(request, *args):
            engine.runner.flush([request.slot])
            left["state"] = engine.slots.state[:, request.slot].clone()
            finish(request, *args)

        engine._finish = hold
        request = engine.add(LONG_PROMPT, SamplingParams(temperature=0.8, seed=3, max_tokens=LONG, ignore_eos=True))
        common.run(engine)
        assert state is None or engine.steps < LONG // 2 + 100
    return request.output, left["state"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", [SMALL, "kimi_linear"])
def test_four_thousand_tokens_leave_the_state_of_serial_decoding(family, state):
    want, serial = long_run(family)
    got, left = long_run(family, state)
    assert got == want
    assert float((left - serial).abs().max() / serial.abs().max()) < 1e-4


def test_ngrams_find_what_followed_last_time():
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 7, 8, 1, 2, 3]
    with common.engine_of(**OPTIONS) as engine:
        request = engine.make(text, greedy())
        assert engine.drafter.propose([request], [3]) == [[7, 7, 8]]
        assert engine.drafter.propose([request], [0]) == [[]]
        request.tokens.append(4)  # 1 2 3 4 stood at the beginning
        assert engine.drafter.propose([request], [2]) == [[5, 9]]
        request.tokens.append(60)
        assert engine.drafter.propose([request], [2]) == [[]]


def test_a_text_that_repeats_itself_is_drafted_and_fewer_steps_run():
    """The greedy text of a small model soon goes in circles."""
    with common.engine_of(load_model("gdn", device="cpu"), **{**OPTIONS, "context": 512}) as engine:
        request = engine.add("the sea the sea the sea", greedy(200, ignore_eos=True))
        common.run(engine)
        assert request.drafts_kept > 50
        assert request.drafts_kept == engine.stats.drafts_kept
        assert engine.steps == 200 - request.drafts_kept
        assert request.drafts_kept <= request.drafted


def with_head(folder, family=SMALL):
    """A tiny model with a random MTP head beside it."""
    model = deepcopy(tiny.model_of(family))
    model.save_pretrained(folder)
    torch.manual_seed(5)
    head = MTPHead(model)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2)
    save_file({f"mtp.{name}": value for name, value in head.state_dict().items()}, folder / "mtp.safetensors")
    return dataclasses.replace(common.as_loaded(model), path=folder)


@pytest.mark.parametrize(
    "options", [{}, {"chunk_tokens": 7, "page_size": 3}, {"spec_state": "fold", "prefix_cache": True}]
)
def test_the_heads_drafts_are_those_of_the_head_alone(tmp_path, options):
    """What it proposes after any number of kept tokens equals `MTPHead.draft` on the whole text at once."""
    loaded = with_head(tmp_path)
    head, prompts = load_mtp(tmp_path, loaded.model), common.prompts_of(SMALL)
    options = {**OPTIONS, "spec": "mtp", "prefix_interval": 12, **options}
    with common.engine_of(loaded, **options) as engine:
        propose, compared = engine.drafter.propose, [0]

        def checked(requests, most):
            found = propose(requests, most)
            for request, drafts, count in zip(requests, found, most, strict=True):
                assert len(drafts) == count
                text = torch.tensor([request.tokens.tolist()])
                with torch.no_grad():
                    hidden = tiny.model_of(SMALL).model(text[:, :-1]).last_hidden_state
                    want = head.draft(hidden, text[:, 1:], count)[0].tolist() if count else []
                if not request.preemptions and not request.cached_tokens:
                    assert drafts == want
                    compared[0] += count > 0
            return found

        engine.drafter.propose = checked
        assert common.answers(engine, prompts) == [stock(SMALL, prompt) for prompt in prompts]
        assert compared[0] > 50


def test_the_shipped_head_is_often_right():
    prompt = "In the beginning God created the heaven and the earth. And the earth"
    params = greedy(120, ignore_eos=True)
    with common.engine_of(load_model("gdn", device="cpu"), **{**OPTIONS, "context": 512, "spec": "mtp"}) as engine:
        request = engine.add(prompt, params)
        common.run(engine)
        assert request.drafts_kept > 0.3 * request.drafted > 0
    with common.engine_of(load_model("gdn", device="cpu"), **{**common.OPTIONS, "context": 512}) as engine:
        plain = engine.add(prompt, params)
        common.run(engine)
    assert request.output == plain.output


def test_a_model_without_a_head_is_refused(tmp_path):
    with_head(tmp_path)
    (tmp_path / "mtp.safetensors").unlink()
    loaded = dataclasses.replace(common.as_loaded(deepcopy(tiny.model_of(SMALL))), path=tmp_path)
    with pytest.raises(ModelFilesError, match=r"has no tensors named mtp\.\*"):
        Engine(loaded, EngineOptions(spec="mtp", ring_len=8))
    with pytest.raises(UnsupportedModelError, match="has no MTP head known here"):
        Engine(load_model("kda", device="cpu"), EngineOptions(spec="mtp", ring_len=8))
    with pytest.raises(OptionError, match="needs a checkpoint folder"), common.engine_of(**{**OPTIONS, "spec": "mtp"}):
        pass


def test_draft_lengths_follow_what_pays():
    pace, good, bad = DraftPace(4), object(), object()
    for width, seconds in ((1, 1.0), (2, 1.1), (3, 1.2), (4, 1.3), (5, 1.4)):
        for _ in range(50):
            pace.measured(3, width, seconds)
    for _ in range(60):
        pace.wanted(good, 3), pace.wanted(bad, 3)
        pace.learn(good, 4, 4)
        pace.learn(bad, 4, 0)
    assert pace.wanted(good, 3) == 4
    tried = [pace.wanted(bad, 3) for _ in range(1000)]
    assert max(tried) == 1
    assert 2 <= sum(tried) < 40  # it tries again, ever more seldom
    for _ in range(60):
        pace.learn(bad, 1, 1)
    assert max(pace.wanted(bad, 3) for _ in range(300)) == 4
    for width in (2, 3, 4, 5):
        for _ in range(200):
            pace.measured(3, width, 10.0)  # as where a step is bound by arithmetic
    assert pace.wanted(good, 3) == 0
    assert pace.wanted(object(), 64) == 4  # of another size nothing is known yet
    assert DraftPace(4, adaptive=False).wanted(bad, 3) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spec": "oracle"}, "spec 'oracle' is unknown; use one of ngram, mtp"),
        ({"spec": "ngram", "spec_state": "undo"}, "use one of ring, snapshot, kv-replay, fold"),
        ({"spec": "ngram", "ring_len": 4}, "a window of 5 tokens, .* ring of 4; use ring_len 6 or more, or .* up to 2"),
        ({"spec": "ngram", "ring_len": 2}, "use ring_len 6 or more$"),
        ({"spec": "ngram", "spec_tokens": 63, "ring_len": 64}, "use 1…62"),
        ({"spec": "ngram", "spec_tokens": 0}, "spec_tokens"),
        ({"spec": "ngram", "mode": "packed"}, "mode 'packed' has none; use mode 'auto' or 'replay'"),
        ({"spec": "ngram", "prefix_cache": True, "prefix_policy": "truncate", "ring_len": 8}, "use 'materialize'"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(options, said):
    with pytest.raises(OptionError, match=said), common.engine_of(**options):
        pass
