"""The tree of the prefix cache alone, on the host: time to look a prefix up, to enter one, to give a page up.

Slots and states are books without tensors, so nothing is copied. The prefixes are those of conversations: √n trunks,
each with √n ends of one interval, all of one depth. Everything is timed in the full tree, in one thread. What a look-up
finds and whether an entry was made is checked each time, and the books at the end; a row that is wrong has no times.

    page_size, prefixes, depth, places        of the tree; places are its nodes
    status, error                             "ok" or "failed", and why
    match_us                                  look-up of a whole prefix: {mean, median, p99}
    insert_us                                 entry of a prefix that is an interval deeper than what is known
    fresh_us                                  entry of one that shares nothing
    evict_us                                  room for one page
    target_us, met                            of the means of the first two
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from typing import Any, cast

from replayssm.bench.prefix_request import TARGET_US, TREE_PAGES, PrefixRequest
from replayssm.bench.serving import Progress
from replayssm.bench.serving_stats import summary
from replayssm.bench.workload import RunError
from replayssm.state import PagePool, SlotPool
from replayssm.state.prefix import PrefixCache

SAMPLES = 2000
EVICTIONS = 50
VOCABULARY = 2**17
TIMES = ("match_us", "insert_us", "fresh_us", "evict_us")


class Books:
    """What the cache asks of a pool of slots, without the slots."""

    ring_len: int | None = None

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free, self._used = list(range(slots)), set[int]()

    @property
    def used_slots(self) -> int:
        """How many are taken."""
        return len(self._used)

    def can_allocate(self, count: int = 1) -> bool:
        """See `SlotPool`."""
        return count <= len(self._free)

    def allocate(self, count: int = 1, owner: object = None) -> list[int]:
        """See `SlotPool`."""
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """See `SlotPool`."""
        self._used.difference_update(slots)
        self._free += slots

    def copy_to(self, src: int, pool: object, dst: int) -> None:
        """Nothing is there to copy."""


class Forest:
    """A full tree, and prefixes to look up and to enter."""

    def __init__(self, prefixes: int, depth: int, extension: int, page_size: int, seed: int) -> None:
        self.size, self.extension = page_size, extension
        self.depth = depth // page_size * page_size
        self.draw = random.Random(seed)
        self.samples = min(SAMPLES, prefixes)
        trunks = isqrt(prefixes)
        ends = prefixes + self.samples
        pages = (trunks * (self.depth - extension) + ends * extension) // page_size
        self.pages = PagePool((), pages, page_size)
        books = cast(SlotPool, Books(trunks + ends))
        self.cache = PrefixCache(books, self.pages, books)
        self.fresh: list[float] = []
        self.trunks = [self._trunk() for _ in range(trunks)]
        self.kept: list[array[int]] = []
        for i in range(prefixes):
            _, tokens = self.enter(i)
            if i % max(1, prefixes // self.samples) == 0:
                self.kept.append(tokens)

    def tokens(self, count: int) -> array[int]:
        """Random ones."""
        return array("i", self.draw.choices(range(VOCABULARY), k=count))

    def enter(self, which: int) -> tuple[float, array[int]]:
        """A new prefix on a trunk; seconds, and its tokens."""
        tokens, pages = self.trunks[which % len(self.trunks)]
        tokens = tokens + self.tokens(self.extension)
        own = self.pages.allocate(self.extension // self.size)
        seconds = _timed(lambda: self.cache.insert(tokens, pages + own, 0), True)
        self.pages.free(own)
        return seconds, tokens

    def _trunk(self) -> tuple[array[int], list[int]]:
        tokens = self.tokens(self.depth - self.extension)
        pages = self.pages.allocate(len(tokens) // self.size)
        self.fresh.append(_timed(lambda: self.cache.insert(tokens, pages, 0), True))
        return tokens, pages

    def leave(self) -> None:
        """The requests that made the trunks end."""
        for _, pages in self.trunks:
            self.pages.free(pages)


def run(request: PrefixRequest, progress: Progress) -> list[dict[str, Any]]:
    """A row for each page size."""
    args, rows = request.args, []
    for size in TREE_PAGES:
        row: dict[str, Any] = dict(page_size=size, prefixes=args.prefixes, depth=args.depth, places=None)
        row |= dict(status="failed", error=None, **dict.fromkeys(TIMES), target_us=TARGET_US, met=None)
        with progress(f"tree of {args.prefixes} prefixes, pages of {size}"):
            try:
                row |= measure(args.prefixes, args.depth, request.extension[size], size, args.seed)
            except Exception as error:  # the other rows still count
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        rows.append(row)
    return rows


def measure(prefixes: int, depth: int, extension: int, page_size: int, seed: int) -> dict[str, Any]:
    """Times of one tree. Raises `RunError` when it finds something else than was put in."""
    forest = Forest(prefixes, depth, extension, page_size, seed)
    cache, places = forest.cache, forest.cache.cached_pages
    match = [_timed(partial(_depth, cache, tokens), forest.depth) for tokens in forest.kept]
    for tokens, _ in forest.trunks:
        other = tokens + forest.tokens(extension)
        _timed(partial(_depth, cache, other), len(tokens))
    insert = [forest.enter(i)[0] for i in range(forest.samples)]
    cache.check()
    forest.leave()
    evict = [_timed(lambda: cache.evict_pages(1), 1) for _ in range(EVICTIONS)]
    cache.check()
    times = [_us(one) for one in (match, insert, forest.fresh, evict)]
    met = all(one["mean"] < TARGET_US for one in times[:2])
    return dict(zip(TIMES, times, strict=True)) | dict(status="ok", depth=forest.depth, places=places, met=met)


def _depth(cache: PrefixCache, tokens: array[int]) -> int:
    return cache.match(tokens).depth


def _timed(work: Callable[[], object], wanted: object) -> float:
    begin = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - begin
    if found != wanted:
        raise RunError(f"the tree answers {found}, expected {wanted}")
    return seconds


def _us(seconds: list[float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in (summary(seconds) or {}).items()}
