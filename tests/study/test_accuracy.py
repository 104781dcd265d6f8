"""Scores: exact, with intervals that hold what they say, and the same completions however rows are batched."""

import math
from contextlib import nullcontext

import pytest
import torch
from transformers import GenerationConfig

from replayssm.errors import PromptError
from replayssm.models.loading import load_model
from replayssm.study import accuracy, task
from replayssm.study.setting import BASELINE, Setting


@pytest.fixture(scope="module")
def loaded():
    return load_model("gdn")


def test_completions_are_those_of_each_prompt_alone(loaded, monkeypatch):
    """Left padding and batches change no token; neither does replay."""
    problems = task.problems("test", 5, lengths=(3, 9), limits=(99,))
    together = accuracy.solve(loaded, problems, Setting("replay"))
    monkeypatch.setattr(accuracy, "BATCH", 1)
    assert accuracy.solve(loaded, problems, BASELINE) == together
    assert len(together) == 5
    assert len(set(together)) > 1


class Parrot:
    """A model that knows some answers, writes beyond its end-of-text token, and is wrong by one for others."""

    device = torch.device("cpu")

    generation_config = GenerationConfig(eos_token_id=0)

    def __init__(self, tokenizer, problems, right):
        self.tokenizer, self.problems, self.right, self.calls = tokenizer, iter(problems), right, []

    def modules(self):
        return iter(())

    def generate(self, ids, attention_mask, max_new_tokens, eos_token_id, **options):
        self.calls.append((ids, attention_mask, max_new_tokens))
        rows = []
        for _ in ids:
            problem = next(self.problems)
            answer = problem.answer + (problem not in self.right)
            text = problem.solution.replace(f"Answer: {problem.answer}", f"Answer: {answer}")
            rows.append([*self.tokenizer(text).input_ids, eos_token_id])
        width = max(map(len, rows))
        tail = torch.tensor([row + [99] * (width - len(row)) for row in rows])
        return torch.cat([ids, tail], 1)


def test_scores_are_exact(loaded, monkeypatch):
    problems = task.problems("test", 6)
    monkeypatch.setattr(accuracy, "BATCH", 4)
    monkeypatch.setattr(accuracy, "using", lambda loaded, setting: nullcontext())
    parrot = Parrot(loaded.tokenizer, [*problems, *problems], problems[:4])
    fake = type("Fake", (), dict(model=parrot, tokenizer=loaded.tokenizer))()
    (row,) = accuracy.measure(fake, problems, [Setting("stock")])
    assert (row["right"], row["count"], row["accuracy"], row["changed"]) == (4, 6, pytest.approx(2 / 3), 0)
    assert (row["low"], row["high"]) == accuracy.interval(4, 6)
    ids, mask, longest = parrot.calls[0]
    eos = 0
    assert bool((ids[mask == 0] == eos).all())
    assert all(int(row[m.argmax()]) == eos for row, m in zip(ids, mask, strict=True)), "a text starts with its token"
    assert longest == 1 + max(len(loaded.tokenizer(p.solution).input_ids) for p in problems)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (80, 100, 0.7112, 0.8666)]
)
def test_wilsons_interval(right, count, low, high):
    assert accuracy.interval(right, count) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_interval_covers_the_truth():
    """Over all outcomes of 60 draws with p = 0.85, about 95 % of the mass lies where the interval holds p."""
    p, n = 0.85, 60
    mass = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    covered = sum(m for k, m in enumerate(mass) if accuracy.interval(k, n)[0] <= p <= accuracy.interval(k, n)[1])
    assert 0.93 < covered < 0.98


def test_a_tokenizer_without_an_end_is_refused(loaded):
    model = type("Model", (), dict(generation_config=GenerationConfig()))()
    fake = type("Fake", (), dict(model=model, tokenizer=type("T", (), dict(eos_token_id=None))()))()
    with pytest.raises(PromptError, match="end-of-text"):
        accuracy.solve(fake, task.problems("test", 1), BASELINE)
