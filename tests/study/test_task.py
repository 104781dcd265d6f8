"""The task: a documented format, the same problems everywhere, parts that cannot overlap, exact scores."""

from __future__ import annotations

import hashlib

import pytest

from replayssm.errors import OptionError
from replayssm.study.task import SETS, SPLITS, Problem, first_error, is_right, problems, read_answer

EXAMPLE = Problem((47, 12, 85))


def test_format():
    assert EXAMPLE.prompt == "Sum: 47+12+85\n"
    assert EXAMPLE.solution == "47+12=59\n59+85=144\nAnswer: 144"
    assert EXAMPLE.text == EXAMPLE.prompt + EXAMPLE.solution
    assert EXAMPLE.answer == 144


def test_every_line_of_the_working_is_true_and_starts_from_the_one_before():
    for problem in problems("train", 200):
        *lines, last = problem.solution.split("\n")
        total = problem.numbers[0]
        for line, number in zip(lines, problem.numbers[1:], strict=True):
            assert line == f"{total}+{number}={total + number}"
            total += number
        assert last == f"Answer: {total}"
        assert total <= 990


def test_the_same_problems_on_every_machine():
    texts = "\n\n".join(problem.text for split in SPLITS for problem in problems(split, 50, seed=3))
    digest = hashlib.sha256(texts.encode()).hexdigest()
    assert digest == "2f142a56afcc9f799e5c65ae122cd1322edaaf2f12e4420e62ddab98f6ea82cc"


def test_a_larger_count_continues_a_smaller_one_and_seeds_differ():
    assert problems("test", 30)[:10] == problems("test", 10)
    assert problems("test", 30, seed=1) != problems("test", 30)
    assert problems("test", 0) == []


def test_parts_are_disjoint_whatever_the_seed():
    drawn = {split: {p for seed in range(3) for p in problems(split, 300, seed)} for split in SPLITS}
    for split, found in drawn.items():
        assert {p.split for p in found} == {split}
    assert not drawn["train"] & (drawn["valid"] | drawn["test"])
    assert not drawn["valid"] & drawn["test"]


def test_problems_are_different_and_all_lengths_appear():
    found = problems("test", 500)
    assert len(set(found)) == 500
    assert {len(p.numbers) for p in found} == set(range(3, 11))
    assert {len(p.numbers) for p in problems("valid", 50, lengths=(10,))} == {10}
    assert all(1 <= n <= 99 for p in found for n in p.numbers)
    small = sum(max(p.numbers) <= 9 for p in found)
    assert 200 < small < 300
    assert all(max(p.numbers) <= 9 for p in problems("valid", 50, lengths=(6, 7), limits=(9,)))


def test_sets_to_score_on():
    assert SETS["usual"].draw(40) == problems("test", 40)
    large = SETS["large"].draw(400)
    assert {len(p.numbers) for p in large} == {10}
    assert {n for p in large for n in p.numbers} == set(range(80, 100))
    assert {p.split for p in large} == {"test"}
    known = problems("train", 60_000, seed=20)  # as in `prepare_data.py`
    assert max(p.answer for p in known) < min(p.answer for p in large)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("47+12=59\n59+85=144\nAnswer: 144", 144),
        ("nonsense\nAnswer: 7\nAnswer: 144", 7),
        ("Answer: 144 and more", None),
        ("Answer: ", None),
        ("The Answer: 144", None),
        ("", None),
    ],
)
def test_reading_an_answer(completion, answer):
    assert read_answer(completion) == answer
    assert is_right(EXAMPLE, completion) == (answer == 144)


def test_first_error():
    assert first_error(EXAMPLE, EXAMPLE.solution) is None
    assert first_error(EXAMPLE, "47+12=59\n59+85=145\nAnswer: 145") == 1
    assert first_error(EXAMPLE, "47+12=59\n59+85=144") == 2
    assert first_error(EXAMPLE, "") == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("exam", 1), "parts: train, valid, test"),
        (("test", -1), "-1 problems"),
        (("test", 100, 0, (2,)), r"100 problems of part 'test' are outside 0…98"),
        (("test", 1, 0, (), (9, 100)), "largest number 100"),
        (("test", 1, 0, (), ()), "largest number None"),
        (("test", 1, 0, (1,)), "problem of 1 numbers"),
        (("test", 1, 0, (11,)), "problem of 11 numbers"),
        (("test", 1, 0, (), (9, 99), 10), r"smallest number 10 is outside 1…9"),
        (("test", 26, 0, (2,), (99,), 50), r"26 problems of part 'test' are outside 0…25"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(OptionError, match=words):
        problems(*arguments)
