"""Scores: exact, with intervals that hold what they say, and the same completions however rows are batched."""

import math
from contextlib import nullcontext

import pytest
import torch
from transformers import GenerationConfig

from replayssm.errors import PromptError
from replayssm.models.loading import load_model
from replayssm.study import accuracy, tables, task
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
        self.tokenizer, self.right, self.calls = tokenizer, right, []
        self.problems = {problem.prompt: problem for problem in problems}

    def modules(self):
        return iter(())

    def generate(self, ids, attention_mask, max_new_tokens, eos_token_id, **options):
        self.calls.append((ids, attention_mask, max_new_tokens))
        rows = []
        for prompt in self.tokenizer.batch_decode(ids, skip_special_tokens=True):
            problem = self.problems[prompt]
            answer = problem.answer + (problem not in self.right)
            text = problem.solution.replace(f"Answer: {problem.answer}", f"Answer: {answer}")
            rows.append([*self.tokenizer(text).input_ids, eos_token_id])
        width = max(map(len, rows))
        tail = torch.tensor([row + [99] * (width - len(row)) for row in rows])
        return torch.cat([ids, tail], 1)


def solutions(loaded, problems):
    return [len(loaded.tokenizer(problem.solution).input_ids) for problem in problems]


def parrot_of(loaded, problems, right, monkeypatch):
    monkeypatch.setattr(accuracy, "using", lambda loaded, setting: nullcontext())
    parrot = Parrot(loaded.tokenizer, problems, right)
    return parrot, type("Fake", (), dict(model=parrot, tokenizer=loaded.tokenizer))()


def test_scores_are_exact(loaded, monkeypatch):
    problems = task.problems("test", 6)
    monkeypatch.setattr(accuracy, "BATCH", 4)
    parrot, fake = parrot_of(loaded, problems, set(problems[:3] + problems[5:]), monkeypatch)
    (row,) = accuracy.measure(fake, problems, [Setting("stock")])
    assert (row["right"], row["count"], row["accuracy"]) == (4, 6, pytest.approx(2 / 3))
    assert (row["lost"], row["gained"], row["changed"]) == (0, 0, 0)
    assert (row["low"], row["high"]) == accuracy.interval(4, 6)
    eos, lengths = 0, sorted(solutions(loaded, problems))
    assert [longest for *_, longest in parrot.calls] == [n + accuracy.SPARE for n in (lengths[3], lengths[5])] * 2
    for ids, mask, _ in parrot.calls:
        assert bool((ids[mask == 0] == eos).all())
        assert all(int(row[m.argmax()]) == eos for row, m in zip(ids, mask, strict=True)), "a text starts with it"


def test_every_completion_goes_to_its_problem_and_is_cut_at_its_own_length(loaded, monkeypatch):
    problems = task.problems("test", 9)
    _, fake = parrot_of(loaded, problems, set(problems), monkeypatch)
    assert accuracy.solve(fake, problems, BASELINE) == [problem.solution for problem in problems]
    monkeypatch.setattr(accuracy, "SPARE", -2)
    cut = accuracy.solve(fake, problems, BASELINE)
    assert [len(loaded.tokenizer(text).input_ids) for text in cut] == [n - 2 for n in solutions(loaded, problems)]
    assert all(problem.solution.startswith(text) for problem, text in zip(problems, cut, strict=True))


def test_a_setting_is_compared_with_the_baseline_problem_by_problem(loaded, monkeypatch):
    problems = task.problems("test", 5)
    right = [problem.solution for problem in problems]
    wrong = [f"Answer: {problem.answer + 1}" for problem in problems]
    short = [f"Answer: {problem.answer}" for problem in problems]
    written = {
        BASELINE: [right[0], right[1], right[2], wrong[3], wrong[4]],
        Setting("stock"): [short[0], wrong[1], wrong[2], right[3], wrong[4]],
    }
    monkeypatch.setattr(accuracy, "solve", lambda loaded, problems, setting: written[setting])
    base, stock = accuracy.measure(loaded, problems, list(written))
    assert [base[key] for key in ("right", "lost", "gained", "changed")] == [3, 0, 0, 0]
    assert [stock[key] for key in ("right", "lost", "gained", "changed")] == [2, 2, 1, 4]


def test_a_table_for_each_model_and_set():
    scores = dict(count=8, low=0.25, high=0.75, lost=1, gained=2, changed=3)
    rows = [
        setting.as_row() | scores | dict(set=kind, right=right, accuracy=right / 8)
        for kind, right in (("usual", 8), ("large", 4))
        for setting in (Setting("stock"), Setting("replay", "bfloat16"))
    ]
    usual, large = tables.scores(dict(task=dict(gdn=rows)))
    assert usual.title == "model gdn, 8 sums of 3 to 10 numbers"
    assert usual.rows[0] == ["stock", "–", "1.000", "0.250 … 0.750", "1", "2", "3"]
    assert large.title == "model gdn, 8 sums of 10 numbers from 80 to 99"
    assert large.rows[1] == ["replay, L = 8", "bfloat16", "0.500", "0.250 … 0.750", "1", "2", "3"]
    assert [len(usual.rows), len(large.rows)] == [2, 2]
    assert large.header[4:] == ("lost", "gained", "changed")


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
