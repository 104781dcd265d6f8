"""The prefix cache against a model that remembers everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replayssm.errors import CacheStateError
from replayssm.spec import LayerSpec
from replayssm.state import PagePool, SlotPool, TokenArray
from replayssm.state.prefix import PrefixCache

SPEC = LayerSpec("gdn", 1, 2, 4, 3, 2)
ARRAYS = [[TokenArray(1, 2, torch.float32)] * 2]


def build(page_size, slots=3, pages=24, states=4):
    running = SlotPool([SPEC] * 2, slots, 4, io_dtype="float32")
    cached = SlotPool([SPEC] * 2, states, None, io_dtype="float32")
    pool = PagePool(ARRAYS, pages, page_size)
    return PrefixCache(running, pool, cached)


def mark(tokens):
    """A number that stands for the state after these tokens, exact in fp32."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 1) % 65521
    return float(value)


class Runner:
    """A request that "computes": its state is `mark` of its tokens, its pages hold the tokens themselves."""

    def __init__(self, cache, tokens):
        self.cache, self.tokens = cache, []
        (self.slot,) = cache.slots.allocate()
        self.pages = []
        self.target = list(tokens)

    def write(self, tokens):
        """Compute more tokens; False when there are no pages for them."""
        pool, size = self.cache.pages, self.cache.pages.page_size
        more = pool.pages_for(len(self.tokens) + len(tokens)) - len(self.pages)
        if more > 0:
            if not pool.can_allocate(more):
                self.cache.evict_pages(more - pool.free_pages)
            if not pool.can_allocate(more):
                return False
            self.pages += pool.allocate(more)
        for token in tokens:
            at = len(self.tokens)
            assert pool.owners(self.pages[at // size]) == 1, "a page that somebody else reads was about to be written"
            for x in pool.arrays[0]:
                x[self.pages[at // size] * size + at % size] = token
            self.tokens.append(token)
        self.cache.slots.state[:, self.slot] = mark(self.tokens)
        self.cache.slots.conv[:, self.slot] = -mark(self.tokens)
        return True

    def check(self):
        size = self.cache.pages.page_size
        for at, token in enumerate(self.tokens):
            for x in self.cache.pages.arrays[0]:
                assert bool((x[self.pages[at // size] * size + at % size] == token).all())
        if self.tokens:
            assert bool((self.cache.slots.state[:, self.slot] == mark(self.tokens)).all())

    def end(self):
        self.cache.slots.free([self.slot])
        self.cache.pages.free(self.pages)


class Model(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3, 5]), states=st.integers(1, 4))
    def start(self, page_size, states):
        self.cache = build(page_size, states=states)
        self.running = []
        self.inserted = set()

    @precondition(lambda self: len(self.running) < 3)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), most=st.integers(0, 14))
    def admit(self, tokens, most):
        cache = self.cache
        match = cache.match(tokens, most)
        assert match.depth <= min(most, len(tokens))
        if match.place is not None:
            assert tuple(tokens[: match.depth]) in self.inserted
            assert bool((cache.states.state[:, match.place.state] == mark(tokens[: match.depth])).all())
        locked = cache.lock(match)
        request = Runner(cache, tokens)
        need = 1 if match.depth % cache.pages.page_size else 0
        if not cache.pages.can_allocate(need):
            cache.evict_pages(need)
        if not cache.pages.can_allocate(need):
            cache.pages.free(locked)
            cache.slots.free([request.slot])
            return
        request.pages = cache.adopt(match, locked, request.slot)
        request.tokens = list(tokens[: match.depth])
        cache.count(len(tokens), match)
        request.check()
        assert int(cache.slots.cursor[request.slot]) == 0
        self.running.append(request)
        request.write(tokens[match.depth :])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def go_on(self, which, more):
        self.running[which % len(self.running)].write(more)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def snapshot(self, which):
        request = self.running[which % len(self.running)]
        if request.tokens and self.cache.insert(request.tokens, request.pages, request.slot):
            self.inserted.add(tuple(request.tokens))
            again = self.cache.match(request.tokens)
            assert again.depth == len(request.tokens)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), donate=st.booleans())
    def finish(self, which, donate):
        request = self.running.pop(which % len(self.running))
        if donate and request.tokens and self.cache.insert(request.tokens, request.pages, request.slot, give=True):
            self.inserted.add(tuple(request.tokens))
        request.end()

    @rule(wanted=st.integers(1, 30))
    def make_room(self, wanted):
        before = self.cache.pages.free_pages
        freed = self.cache.evict_pages(wanted)
        assert self.cache.pages.free_pages == before + freed

    @rule()
    def forget_everything(self):
        self.cache.clear()
        assert (self.cache.cached_pages, self.cache.states.used_slots) == (0, 0)

    @invariant()
    def books(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check()
        for pool in (cache.pages, cache.slots, cache.states):
            pool.check()
        for request in self.running:
            request.check()
        if not self.running:
            assert cache.pages.used_pages == cache.cached_pages

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for request in self.running:
            request.end()
        self.cache.clear()
        assert self.cache.pages.free_pages == self.cache.pages.pages
        assert self.cache.states.free_slots == self.cache.states.slots


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_match_is_as_deep_as_the_deepest_state_with_all_its_pages():
    cache = build(4)
    request = Runner(cache, [])
    request.write(range(8))
    assert cache.insert(request.tokens, request.pages, request.slot)
    request.write([8, 9, 10])
    assert cache.insert(request.tokens, request.pages, request.slot)
    request.write([11, 12])
    assert [cache.match(list(range(n))).depth for n in (7, 8, 10, 11, 13)] == [0, 8, 8, 11, 11]
    assert cache.match(list(range(13)), most=10).depth == 8
    assert cache.match([*range(8), 99, 9, 10]).depth == 8


def test_a_cached_page_is_not_written_by_the_request_that_goes_on():
    cache = build(4)
    request = Runner(cache, [])
    request.write([5, 6])
    cache.insert(request.tokens, request.pages, request.slot)
    request.write([7, 8, 9])
    other = Runner(cache, [])
    match = cache.match([5, 6, 1])
    other.pages, other.tokens = cache.adopt(match, cache.lock(match), other.slot), [5, 6]
    other.check()
    other.write([1, 2])
    request.check()
    assert cache.match([5, 6]).depth == 2


def test_states_and_pages_that_were_not_used_go_first():
    cache = build(2, states=2)
    request = Runner(cache, [])
    for tokens in ([1, 2], [3, 4]):
        request.write(tokens)
        cache.insert(request.tokens, request.pages, request.slot)
    cache.match([1, 2])
    other = Runner(cache, [])
    other.write([9, 9])
    assert cache.insert(other.tokens, other.pages, other.slot)
    assert [cache.match(t).depth for t in ([1, 2], [1, 2, 3, 4], [9, 9])] == [2, 2, 2]
    assert cache.match([1, 2, 3, 4]).pages_depth == 4, "the pages of a dropped state stay"
    assert cache.stats.states_evicted == 1


def test_what_a_request_uses_is_not_evicted():
    cache = build(2)
    request = Runner(cache, [])
    request.write([1, 2, 3, 4])
    cache.insert(request.tokens, request.pages, request.slot)
    assert cache.evict_pages(100) == 0
    request.end()
    assert cache.evict_pages(1) == 1
    assert cache.match([1, 2, 3, 4]).pages_depth == 2


def test_a_key_that_is_not_as_long_as_its_pages_is_refused():
    cache = build(4)
    request = Runner(cache, [])
    request.write([1, 2, 3, 4, 5])
    with pytest.raises(CacheStateError, match="5 tokens take 2 pages of 4, given are 1"):
        cache.insert(request.tokens, request.pages[:1], request.slot)
    with pytest.raises(CacheStateError, match="without rings"):
        PrefixCache(cache.slots, cache.pages, cache.slots)


def test_room_for_a_tail_is_not_made_by_evicting_what_it_hangs_on():
    """The node on the way is the cache's alone: both computed the same page, and only one gave it to the tree."""
    cache = build(2, pages=4)
    first, second = Runner(cache, []), Runner(cache, [])
    first.write([1, 2])
    second.write([1, 2, 3])
    cache.insert(first.tokens, first.pages, first.slot)
    first.end()
    blocker = cache.pages.allocate(cache.pages.free_pages)
    assert cache.pages.free_pages == 0
    assert not cache.insert(second.tokens, second.pages, second.slot), "no page for the tail"
    cache.check()
    assert cache.match([1, 2, 3]).depth == 2
    cache.pages.free(blocker)
    assert cache.insert(second.tokens, second.pages, second.slot)
    cache.check()
    assert cache.match([1, 2, 3]).depth == 3
