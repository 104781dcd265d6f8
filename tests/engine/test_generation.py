"""What parameters ask for, through a whole generation: sampling, penalties, logprobs, stops, several outputs."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch

from replayssm.engine.llm import LLM
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import _GOLDEN
from replayssm.engine.sampler import History, prepare, sample
from tests import tolerance
from tests.engine.common import (
    FAMILIES,
    GAP,
    OPTIONS,
    SMALL,
    TOKENS,
    answers,
    as_loaded,
    assert_idle,
    engine_of,
    greedy,
    poison,
    prompt_of,
    run,
    stock,
    stock_with_logits,
)
from tests.models import tiny

WARM = SamplingParams(temperature=1.1, top_p=0.95, seed=11, max_tokens=12)
LONG = prompt_of(SMALL, 17)


def outputs_of(engine, prompt, params, before_step=None):
    """All outputs of one prompt, by index."""
    found = {}

    def listener(request, text):
        if request.finished:
            found[request.index] = request

    engine.add(prompt, params, listener)
    run(engine, before_step)
    assert_idle(engine)
    return [found[index] for index in sorted(found)]


# Sampling.


@pytest.fixture(scope="module")
def alone():
    """Sampled tokens of a request that has an engine for itself."""
    with engine_of() as engine:
        tokens = answers(engine, [LONG], WARM)[0]
    assert tokens != stock(SMALL, LONG)[:12]
    return tokens


def test_tokens_are_what_the_sampler_makes_of_stock_logits():
    """With the noise of the seed and the place in the output, and the penalties of what came before."""
    params = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=8, max_tokens=10)
    batch, want = prepare([params], [8]), []
    for place in range(10):
        with torch.no_grad():
            logits = tiny.model_of(SMALL)(torch.tensor([[*LONG, *want]]), use_cache=False).logits[:, -1]
        prompt, output = torch.zeros(1, tiny.VOCAB, dtype=torch.bool), torch.zeros(1, tiny.VOCAB, dtype=torch.int32)
        prompt[0, list(LONG)] = True
        for token in want:
            output[0, token] += 1
        want.append(int(sample(logits, batch, torch.tensor([place]), History(prompt, output)).tokens))
    for overlap in (False, True):
        with engine_of(overlap=overlap, chunk_tokens=7) as engine:
            assert answers(engine, [prompt_of(SMALL, 5), LONG], [WARM, params])[1] == want


@pytest.mark.parametrize(
    "options",
    [
        {}, {"overlap": True}, {"chunk_tokens": 2}, {"chunk_tokens": 5, "overlap": True}, {"mode": "packed"},
        {"max_requests": 1}, {"page_size": 1, "ring_len": 1}, {"prefix_cache": True, "prefix_interval": 4},
    ],
)  # fmt: skip
def test_a_seeded_request_does_not_depend_on_its_company(alone, options):
    company = [prompt_of(SMALL, length) for length in (1, 5, 8)]
    others = [SamplingParams(seed=3), greedy(), SamplingParams(top_k=4, repetition_penalty=1.2, max_tokens=9)]
    with engine_of(**options) as engine:
        for at in range(4):
            prompts, params = [*company[:at], LONG, *company[at:]], [*others[:at], WARM, *others[at:]]
            params = [p if p.max_tokens < 99 else greedy(7) for p in params]
            assert answers(engine, prompts, params, poison)[at] == alone


@pytest.mark.parametrize("preempt", ["offload", "recompute"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_seeded_request_goes_on_where_it_was_preempted(alone, preempt, overlap):
    with engine_of(pages=10, preempt=preempt, overlap=overlap) as engine:
        engine.add(prompt_of(SMALL, 13), greedy())
        request = engine.add(LONG, WARM)
        run(engine, poison)
        assert request.preemptions > 0
        assert request.output == alone


def test_a_seed_decides_and_none_is_random():
    with engine_of() as engine:
        params = [SamplingParams(seed=seed, max_tokens=12) for seed in (1, 1, 2, None, None)]
        one, same, other, *free = answers(engine, [LONG] * 5, params)
    assert one == same
    assert len({tuple(x) for x in (one, other, *free)}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 16}, {"chunk_tokens": 10}, {"chunk_tokens": 2}, {"max_requests": 2}, {"pages": 8},
        {"overlap": True, "pages": 14, "preempt": "recompute"}, {"page_size": 17}, {"page_size": 1},
        {"prefix_cache": True, "prefix_interval": 4, "pages": 20},
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [1, 16, 17])
def test_forks_are_requests_with_seeds_of_their_own(options, length):
    """Whether they copy the state of their parent, all of it in whole pages or not, or compute it themselves."""
    prompt = prompt_of(SMALL, length)
    seeds = [(11 + index * _GOLDEN) % 2**63 for index in range(3)]
    with engine_of() as engine:
        want = answers(engine, [prompt] * 3, [SamplingParams(seed=seed, max_tokens=12) for seed in seeds])
    assert len({tuple(tokens) for tokens in want}) == 3
    with engine_of(SMALL, **options) as engine:
        found = outputs_of(engine, prompt, SamplingParams(seed=11, max_tokens=12, n=3), poison)
        assert [request.output for request in found] == want
        engine.add(prompt_of(SMALL, 13), greedy())  # and in company
        found = outputs_of(engine, prompt, SamplingParams(seed=11, max_tokens=12, n=3), poison)
        assert [request.output for request in found] == want


# Penalties, bias, logprobs.


@pytest.mark.parametrize("overlap", [False, True])
def test_repetition_penalty_is_that_of_transformers(overlap):
    penalty = 1.3
    prompts = [prompt_of(SMALL, length, repetition_penalty=penalty) for length in (3, 8, 17)]
    with engine_of(overlap=overlap, pages=16) as engine:
        found = answers(engine, [*prompts, LONG], [greedy(repetition_penalty=penalty)] * 3 + [greedy()])
    assert found[:3] == [stock(SMALL, prompt, repetition_penalty=penalty) for prompt in prompts]
    assert found[:3] != [stock(SMALL, prompt) for prompt in prompts]
    assert found[3] == stock(SMALL, LONG)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preempt", ["offload", "recompute"])
@pytest.mark.parametrize("bias", [0.0, 20.0])
def test_presence_and_frequency_penalties_count_the_output(overlap, preempt, bias):
    """Against a loop of whole forwards of the stock model; also with two tokens that come in turns for their counts."""
    presence, frequency = 0.4, 0.3
    want, counts = [], torch.zeros(tiny.VOCAB)
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = tiny.model_of(SMALL)(torch.tensor([[*LONG, *want]]), use_cache=False).logits[0, -1]
        logits[5] += bias
        logits[9] += bias
        best = (logits - presence * (counts > 0) - frequency * counts).topk(2)
        assert best.values[0] - best.values[1] > 1e-3
        want.append(int(best.indices[0]))
        counts[want[-1]] += 1
    params = greedy(presence_penalty=presence, frequency_penalty=frequency, logit_bias={5: bias, 9: bias})
    with engine_of(pages=12, overlap=overlap, preempt=preempt) as engine:
        engine.add(prompt_of(SMALL, 13), greedy())
        request = engine.add(LONG, params)
        run(engine)
        assert request.preemptions > 0
        assert request.output == want != stock(SMALL, LONG)


def test_bias_forces_and_forbids():
    want = stock(SMALL, LONG)
    with engine_of() as engine:
        forced, barred, free = answers(
            engine, [LONG] * 3,
            [greedy(logit_bias={9: 100.0}), greedy(logit_bias=dict.fromkeys(want, -math.inf)), greedy(logit_bias={})],
        )  # fmt: skip
    assert forced == [9] * TOKENS
    assert not set(barred) & set(want)
    assert free == want


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_stock_decoding(family):
    """Eight sublayers, each with the error of a readout, relative to logits of up to 5."""
    limit = 8 * tolerance.arithmetic(48, OPTIONS["ring_len"]) * 5
    assert 2 * limit < GAP
    lengths = (1, 8, 17)
    with engine_of(family, chunk_tokens=7, pages=18) as engine:
        requests = [engine.add(prompt_of(family, length), greedy(logprobs=4)) for length in lengths]
        plain = engine.add(prompt_of(family, 5), greedy())
        run(engine)
    for request, length in zip(requests, lengths, strict=True):
        tokens, logits, _ = stock_with_logits(family, prompt_of(family, length))
        want = logits.log_softmax(-1)
        assert len(request.logprobs) == len(tokens)
        for place, found in enumerate(request.logprobs):
            assert found.token == tokens[place] == found.top[0][0]
            assert abs(found.logprob - float(want[place, found.token])) < limit
            top = torch.tensor([value for _, value in found.top])
            assert float((top - want[place].topk(4).values).abs().max()) < limit
            by_token = torch.tensor([float(want[place, token]) for token, _ in found.top])
            assert float((top - by_token).abs().max()) < limit
    assert plain.logprobs == []


def test_logprobs_of_no_likeliest_tokens():
    with engine_of() as engine:
        request = engine.add(LONG, SamplingParams(seed=1, logprobs=0, max_tokens=5))
        run(engine)
    assert [found.top for found in request.logprobs] == [()] * 5
    assert [found.token for found in request.logprobs] == request.output


# Ends.


@pytest.fixture(scope="module")
def ending():
    """A model that ends its texts with one of two tokens, both in its answer to LONG."""
    model = deepcopy(tiny.model_of(SMALL))
    model.generation_config.eos_token_id = sorted({stock(SMALL, LONG)[i] for i in (6, 9)})
    return as_loaded(model)


def first(tokens, *ends, least=0):
    """Tokens up to the first of `ends` that comes after `least` of them."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends and i >= least), tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_ends_at_its_end(ending, overlap):
    want = stock(SMALL, LONG)
    ends = ending.model.generation_config.eos_token_id
    stop = want[2]
    with engine_of(ending, overlap=overlap) as engine:
        assert engine.stops == set(ends)
        each = [greedy(), greedy(ignore_eos=True), greedy(stop_token_ids=(stop,)), greedy(3)]
        each.append(greedy(ignore_eos=True, stop_token_ids=(want[9],)))
        requests = [engine.add(LONG, params) for params in each]
        run(engine)
        assert_idle(engine)
    assert len(first(want, *ends)) < TOKENS
    expected = [first(want, *ends), want, first(want, stop, *ends), want[:3], first(want, want[9])]
    assert [r.output for r in requests] == expected
    assert [r.reason for r in requests] == ["stop", "length", "stop", "length", "stop"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least", [1, 7, 12, TOKENS])
def test_no_text_ends_before_its_least_length(ending, overlap, least):
    """Tokens that would end it are passed over; as stock decoding with them forbidden."""
    ends = ending.model.generation_config.eos_token_id
    ids = torch.tensor([LONG])
    out = deepcopy(tiny.model_of(SMALL)).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends,
        min_new_tokens=least, pad_token_id=0,
    )  # fmt: skip
    with engine_of(ending, overlap=overlap) as engine:
        found, other = answers(engine, [LONG, LONG], [greedy(min_tokens=least), greedy()])
    assert found == out[0, len(LONG) :].tolist()
    assert not set(found[:least]) & set(ends)
    assert other == first(stock(SMALL, LONG), *ends)


@pytest.mark.parametrize("context", [18, 20, 33])
def test_a_full_context_ends_a_text(context):
    """A prompt of one token less than the context has room for one."""
    with engine_of(context=context, overlap=True) as engine:
        request = engine.add(LONG, greedy())
        run(engine)
        assert_idle(engine)
    assert request.reason == "length"
    assert request.output == stock(SMALL, LONG)[: context - len(LONG)]


# Texts.


@pytest.fixture(scope="module")
def gdn():
    with LLM("gdn", memory=2**30, context=256, max_requests=4) as llm:
        yield llm


PROMPT = "And it came to pass"


@pytest.fixture(scope="module")
def told(gdn):
    (output,) = gdn.generate(PROMPT, greedy(40))
    return output


def test_text_is_what_the_tokens_say(gdn, told):
    assert told.text == gdn.engine.tokenizer.decode(list(told.token_ids), skip_special_tokens=True)
    ids = torch.tensor([gdn.engine.tokenizer.encode(PROMPT)])
    assert told.prompt_token_ids == tuple(ids[0].tolist())
    assert told.finish_reason == "length"


def pieces(llm, output):
    """Where in the text each token begins."""
    decode = llm.engine.tokenizer.decode
    return [len(decode(list(output.token_ids[:n]))) for n in range(len(output.token_ids) + 1)]


def test_stop_texts_end_it_wherever_they_lie(gdn, told):
    """Within a token, across two and across many; the text before it is left, no more and no less."""
    begins, text = pieces(gdn, told), told.text
    stops = [text[at : at + width] for width in (1, 2, 7, 15) for at in range(3, len(text) - width, 17)]
    params = [greedy(40, stop=(stop, "\x00never")) for stop in stops]
    for stop, found in zip(stops, gdn.generate([PROMPT] * len(stops), params), strict=True):
        at = text.index(stop)
        assert (found.text, found.finish_reason) == (text[:at], "stop")
        needed = next(n for n, begin in enumerate(begins) if begin >= at + len(stop))
        assert found.token_ids == told.token_ids[:needed]


def test_a_stop_text_that_never_comes_is_not_held_back(gdn, told):
    stop = told.text[-3:] + "\x00"
    (found,) = gdn.generate(PROMPT, greedy(40, stop=(stop,)))
    assert (found.text, found.finish_reason) == (told.text, "length")


def test_a_stop_text_before_the_least_length_is_text(gdn, told):
    stop = told.text[4:7]
    early, late = gdn.generate([PROMPT] * 2, [greedy(40, stop=(stop,)), greedy(40, stop=(stop,), min_tokens=40)])
    assert len(early.token_ids) < 10
    assert (late.token_ids, late.text) == (told.token_ids, told.text)


def test_several_outputs_of_a_text(gdn):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=8, n=3)
    (found,) = gdn.generate(PROMPT, params)
    assert [one.index for one in found.outputs] == [0, 1, 2]
    assert len({one.token_ids for one in found.outputs}) == 3
    for one in found.outputs:
        assert one.text == gdn.engine.tokenizer.decode(list(one.token_ids), skip_special_tokens=True)
    again = gdn.generate([PROMPT, "She was", PROMPT], params)
    assert [one.token_ids for one in again[2].outputs] == [one.token_ids for one in found.outputs]
