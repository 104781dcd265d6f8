"""Sums with worked steps: a small task with exact answers, trained into the shipped models and scored on them.

A problem is a list of three to ten numbers to be added, from 1 to 9 in half of the problems, from 1 to 99 in the
others. One problem looks like this, without a newline at the end::

    Sum: 47+12+85
    47+12=59
    59+85=144
    Answer: 144

The first line with its newline is the prompt; the model writes the rest, one token a digit. Each line of the working
needs the line before it and the next number of the list, so that one wrong digit spoils everything behind it: as in a
worked answer to a word problem, an error grows with the number of decode steps. Ten numbers take about 100 steps.

Whether a problem is for training, for choosing (`valid`) or for reporting (`test`) follows from a hash of its numbers.
No problem can be in two parts, whatever the seeds. Pure Python, and equal on every machine.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from replayssm.errors import OptionError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
LIMITS = (9, 99)
SHORTEST, LONGEST = 3, 10
ANSWER = "Answer: "
# Of 50 values of the hash, one is for `valid` and one for `test`.
_HASH_VALUES = 50
_FINAL = re.compile(rf"^{ANSWER}(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """Numbers to be added, and the texts made of them."""

    numbers: tuple[int, ...]

    @property
    def split(self) -> Split:
        """The part that this problem belongs to."""
        digest = hashlib.sha256("+".join(map(str, self.numbers)).encode()).digest()
        held_out: dict[int, Split] = {0: "valid", 1: "test"}
        return held_out.get(int.from_bytes(digest[:8], "big") % _HASH_VALUES, "train")

    @property
    def answer(self) -> int:
        """The sum."""
        return sum(self.numbers)

    @property
    def prompt(self) -> str:
        """What the model is given, after an end-of-text token as in training."""
        return f"Sum: {'+'.join(map(str, self.numbers))}\n"

    @property
    def solution(self) -> str:
        """What it has to write, up to an end-of-text token."""
        totals = pairwise(accumulate(self.numbers))
        lines = [f"{old}+{number}={new}" for (old, new), number in zip(totals, self.numbers[1:], strict=True)]
        return "\n".join([*lines, f"{ANSWER}{self.answer}"])

    @property
    def text(self) -> str:
        """Prompt and solution: one document of the training data."""
        return self.prompt + self.solution


class ProblemSet(NamedTuple):
    """Problems to score a model on: the arguments of `problems`, and what a table calls them."""

    title: str
    lengths: tuple[int, ...] = ()
    limits: tuple[int, ...] = LIMITS
    least: int = 1

    def draw(self, count: int) -> list[Problem]:
        """The first `count` problems of its `test` part."""
        return problems("test", count, 0, self.lengths, self.limits, self.least)


# The shipped models solve every usual problem. Totals of `large` are beyond those of their training part, and they fail
# on some.
SETS = {
    "usual": ProblemSet(f"sums of {SHORTEST} to {LONGEST} numbers"),
    "large": ProblemSet(f"sums of {LONGEST} numbers from 80 to 99", (LONGEST,), (99,), 80),
}


def problems(
    split: Split,
    count: int,
    seed: int = 0,
    lengths: tuple[int, ...] = (),
    limits: tuple[int, ...] = LIMITS,
    least: int = 1,
) -> list[Problem]:
    """`count` different problems of one part, in an order that depends on the seed alone.

    Args:
        split: "train", "valid" or "test".
        count: how many.
        seed: of the draw; the same seed gives the same problems, and a larger count continues a smaller one.
        lengths: how many numbers a problem may have, each equally likely; 3 to 10 when empty.
        limits: the largest number that a problem may hold, each equally likely; 99 at most.
        least: the smallest number.

    Raises `OptionError` for an unknown part, a count of which there are too few, lengths or limits out of range.
    """
    if split not in SPLITS:
        raise OptionError(f"part {split!r} of the task is unknown; parts: {', '.join(SPLITS)}")
    lengths = lengths or tuple(range(SHORTEST, LONGEST + 1))
    if bad := [length for length in lengths if not 2 <= length <= LONGEST]:
        raise OptionError(f"a problem of {bad[0]} numbers is outside 2…{LONGEST}")
    if not limits or (bad := [limit for limit in limits if not 1 <= limit <= max(LIMITS)]):
        raise OptionError(f"largest number {bad[0] if limits else None} is outside 1…{max(LIMITS)}")
    share = _HASH_VALUES - 2 if split == "train" else 1
    if not 1 <= least <= min(limits):
        raise OptionError(f"smallest number {least} is outside 1…{min(limits)}")
    most = (max(limits) - least + 1) ** max(lengths) * share // _HASH_VALUES // 2
    if not 0 <= count <= most:
        raise OptionError(f"{count} problems of part {split!r} are outside 0…{most}, half of about all there are")
    rng = random.Random(f"{split} {seed}")
    found: dict[Problem, None] = {}
    while len(found) < count:
        # random() is the one draw whose sequence Python promises to keep between versions
        length, limit = (choices[int(rng.random() * len(choices))] for choices in (lengths, limits))
        problem = Problem(tuple(least + int(rng.random() * (limit - least + 1)) for _ in range(length)))
        if problem.split == split:
            found[problem] = None
    return list(found)


def read_answer(completion: str) -> int | None:
    """The number on the answer line of what a model wrote after a prompt; None when there is no such line."""
    found = _FINAL.search(completion)
    return int(found[1]) if found else None


def is_right(problem: Problem, completion: str) -> bool:
    """Whether the first answer line of a completion, cut off at its end-of-text token, holds exactly the sum."""
    return read_answer(completion) == problem.answer


def first_error(problem: Problem, completion: str) -> int | None:
    """Index of the first line of the completion that is not as in the solution; None when all are."""
    wrote, wanted = completion.split("\n"), problem.solution.split("\n")
    return next((i for i, line in enumerate(wanted) if i >= len(wrote) or wrote[i] != line), None)
