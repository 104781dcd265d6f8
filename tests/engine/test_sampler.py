"""The sampler against transformers' processors, against the distribution it must draw from, and row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as stock

from replayssm.engine.params import SamplingParams
from replayssm.engine.sampler import History, filtered, gumbel, prepare, sample
from replayssm.errors import ShapeError

VOCABULARY = 50


def logits(rows=4, seed=0, scale=3.0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def at(*positions):
    return torch.tensor(positions)


def history_of(prompts, outputs):
    prompt = torch.zeros(len(prompts), VOCABULARY, dtype=torch.bool)
    output = torch.zeros(len(prompts), VOCABULARY, dtype=torch.int32)
    for row, (seen, made) in enumerate(zip(prompts, outputs, strict=True)):
        prompt[row, list(seen)] = True
        for token in made:
            output[row, token] += 1
    return History(prompt, output)


FILTERS = st.fixed_dictionaries(
    dict(
        temperature=st.floats(0.1, 3), top_k=st.sampled_from([0, 1, 5, 49, 50]), top_p=st.floats(0.05, 1),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    )
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.lists(FILTERS, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_filters_leave_what_those_of_transformers_leave(rows, seed):
    """Rows with different parameters in one batch, each against the warpers in the same order."""
    params = [SamplingParams(**row) for row in rows]
    batch, x = prepare(params, range(len(rows))), logits(len(rows), seed)
    got = filtered(x / batch.temperature[:, None], batch)
    for row, p in enumerate(params):
        want = stock.TemperatureLogitsWarper(float(p.temperature))(None, x[row : row + 1])
        if p.top_k:
            want = stock.TopKLogitsWarper(p.top_k)(None, want)
        if p.top_p < 1:
            want = stock.TopPLogitsWarper(p.top_p)(None, want)
        if p.min_p:
            want = stock.MinPLogitsWarper(p.min_p)(None, want)
        torch.testing.assert_close(got[row], want[0], rtol=1e-5, atol=1e-5)


def test_penalties_and_bias():
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.2),
        SamplingParams(temperature=0, logit_bias={7: 100.0, 3: -math.inf}),
        SamplingParams(temperature=0),
    ]
    prompts, outputs = [[1, 2], [3], [4], [5]], [[2, 9], [6, 6, 8], [], [5, 5]]
    x, seen = logits(), history_of(prompts, outputs)
    batch = prepare(params, [0] * 4)
    result = sample(x, batch, at(0, 0, 0, 0), seen)
    want = stock.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[1, 2, 2, 9]]), x[:1].clone())
    assert result.tokens[0] == want.argmax()
    less = x[1].clone()
    less[6] -= 0.7 + 2 * 0.2
    less[8] -= 0.7 + 0.2
    assert result.tokens[1] == less.argmax()
    assert result.tokens[2] == 7
    assert result.tokens[3] == x[3].argmax()
    # Tokens of the prompt, of the output, of both; and the logit that is level with 1 after the penalty.
    for row, token, level in (
        (0, 1, 1.5),
        (0, 9, 1.5),
        (0, 2, 1.5),
        (1, 6, 1 + 0.7 + 0.4),
        (1, 8, 1 + 0.7 + 0.2),
        (1, 3, 1),
    ):
        for logit, wins in ((level - 0.01, False), (level + 0.01, True)):
            y = torch.zeros(4, VOCABULARY)
            y[:, 20], y[row, token] = 1.0, logit
            assert (sample(y, batch, at(0, 0, 0, 0), seen).tokens[row] == token) == wins, (row, token)


def test_a_forbidden_token_is_never_taken():
    params = [SamplingParams(temperature=0), SamplingParams(logit_bias={11: 100.0})]
    x = logits(2)
    forbidden = torch.zeros(2, VOCABULARY, dtype=torch.bool)
    forbidden[0, x[0].argmax()] = forbidden[1, 11] = True
    for position in range(20):
        tokens = sample(x, prepare(params, [1, 2]), at(position, position), forbidden=forbidden).tokens
        assert not forbidden[torch.arange(2), tokens].any()


def test_draws_follow_the_distribution():
    """40,000 draws from 6 tokens; chi-squared with 5 degrees of freedom stays below its 99.99 % point."""
    x = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -40.0]])
    params, draws = SamplingParams(temperature=1.3), 40_000
    batch = prepare([params], [77])
    counts = torch.zeros(6)
    for begin in range(0, draws, 4000):
        rows = 4000
        many = prepare([params] * rows, [77] * rows)
        tokens = sample(x.expand(rows, -1), many, torch.arange(begin, begin + rows)).tokens
        counts += torch.bincount(tokens, minlength=6)
    expected = (x[0] / 1.3).softmax(-1) * draws
    live = expected > 1
    assert float(((counts - expected) ** 2 / expected)[live].sum()) < 25.7
    assert counts[5] == 0
    assert sample(x, batch, at(0)).tokens.shape == (1,)


def test_noise_is_gumbel_and_differs_by_seed_position_and_token():
    noise = gumbel(torch.tensor([1, 1, 2]), at(0, 1, 0), 20_000)
    assert noise.isfinite().all()
    assert noise.mean(1) == pytest.approx([0.5772] * 3, abs=0.04)
    assert noise.var(1) == pytest.approx([math.pi**2 / 6] * 3, abs=0.08)
    correlation = torch.corrcoef(noise)
    assert float((correlation - torch.eye(3)).abs().max()) < 0.03
    shifted = torch.corrcoef(torch.stack([noise[0, 1:], noise[0, :-1]]))
    assert abs(float(shifted[0, 1])) < 0.03


def test_a_row_does_not_depend_on_its_company():
    params = [
        SamplingParams(temperature=0.9, top_p=0.8), SamplingParams(temperature=0), SamplingParams(top_k=3, min_p=0.1),
        SamplingParams(repetition_penalty=1.2, logprobs=3),
    ]  # fmt: skip
    seeds, positions = [5, 6, 7, 8], at(3, 0, 9, 2)
    x, seen = logits(), history_of([[1]] * 4, [[2, 2]] * 4)
    together = sample(x, prepare(params, seeds), positions, seen)
    for row in range(4):
        only = History(*(part[row : row + 1] for part in seen))
        alone = sample(x[row : row + 1], prepare([params[row]], [seeds[row]]), positions[row : row + 1], only)
        assert alone.tokens[0] == together.tokens[row]
    turned = [3, 1, 0, 2]
    again = sample(
        x[turned], prepare([params[i] for i in turned], [seeds[i] for i in turned]), positions[turned],
        History(*(part[turned] for part in seen)),
    )  # fmt: skip
    assert torch.equal(again.tokens, together.tokens[turned])


def test_logprobs_are_of_the_models_own_logits():
    params = [
        SamplingParams(temperature=0, logprobs=2, logit_bias={4: 50.0}),
        SamplingParams(temperature=0.5, logprobs=0),
    ]
    x = logits(2)
    result = sample(x, prepare(params, [0, 1]), at(0, 0))
    want = x.log_softmax(-1)
    assert result.tokens[0] == 4
    torch.testing.assert_close(result.logprobs, want[torch.arange(2), result.tokens])
    torch.testing.assert_close(result.top_logprobs, want.topk(2).values)
    assert torch.equal(result.top_tokens, want.topk(2).indices)
    assert sample(x, prepare([SamplingParams()] * 2, [0, 1]), at(0, 0)).logprobs is None


def test_inputs_stay_as_they_are():
    x = logits(1)
    before = x.clone()
    sample(
        x,
        prepare([SamplingParams(logit_bias={1: 5.0}, top_k=2, frequency_penalty=1)], [0]),
        at(0),
        history_of([[]], [[1]]),
    )
    assert torch.equal(x, before)


def test_sixteen_bit_logits_are_taken_as_they_are():
    x = logits(3).bfloat16()
    params = prepare([SamplingParams(top_p=0.9)] * 3, [1, 2, 3])
    assert torch.equal(sample(x, params, at(0, 1, 2)).tokens, sample(x.float(), params, at(0, 1, 2)).tokens)


def test_refusals():
    with pytest.raises(ShapeError, match="2 rows of parameters, but 1 seeds"):
        prepare([SamplingParams()] * 2, [1])
    with pytest.raises(ShapeError, match="history"):
        sample(logits(1), prepare([SamplingParams(presence_penalty=1)], [1]), at(0))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-44])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    """Logits over it exceed what a number can hold."""
    batch = prepare([SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)] * 2, [0, 1])
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.5], [-90.0, float("-inf"), -91.0, -200.0]])
    assert sample(logits, batch, torch.tensor([0, 1])).tokens.tolist() == [2, 0]
