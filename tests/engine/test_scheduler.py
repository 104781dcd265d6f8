"""Who runs next: order of arrival, budget of a step, room for every token, and no request that waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request
from replayssm.engine.scheduler import Scheduler
from replayssm.state import PagePool

SIZE = 4


class Slots:
    """The books of a slot pool, without states."""

    def __init__(self, slots):
        self.slots, self._free = slots, set(range(slots))

    def can_allocate(self, count=1):
        return count <= len(self._free)

    def allocate(self, count=1, owner=None):
        return [self._free.pop() for _ in range(count)]

    def free(self, slots):
        assert not self._free & set(slots)
        self._free |= set(slots)


class World:
    """A scheduler with an engine's part played by hand. A token is known at once, or with `late` one step later; then
    a request may turn out to have ended, as `ends` says by request and output token."""

    def __init__(self, slots=3, pages=8, chunk_tokens=6, late=False, saved=True, ends=()):
        self.slots, self.pages = Slots(slots), PagePool([], pages, SIZE)
        self.late, self.saved, self.ends = late, saved, set(ends)
        self.flight: list[Request] = []
        self.made: list[Request] = []
        self.log: list[tuple[str, Request]] = []
        self.scheduler = Scheduler(
            self.slots, self.pages, chunk_tokens, self.preempt, self.restore, self.drain, self.made.append
        )

    @property
    def roots(self):
        return [request for request in self.made if request.parent is None]

    def add(self, length, tokens, n=1):
        params = SamplingParams(max_tokens=tokens, n=n)
        request = Request(len(self.roots), list(range(1, length + 1)), params, 0, limit=length + tokens)
        self.made.append(request)
        self.scheduler.waiting.append(request)
        return request

    def preempt(self, request):
        assert request not in self.flight  # its last token would be lost
        self.log.append(("preempt", request))
        request.saved = request.computed if self.saved and request.computed else None
        request.computed = 0
        self.scheduler.release(request)

    def restore(self, request):
        request.computed, request.saved = request.saved, None

    def drain(self):
        flight, self.flight = self.flight, []
        for request in flight:
            if not request.finished:
                request.tokens.append(0)
                made = len(request.output)
                if (request.id, request.index, made) in self.ends or len(request.tokens) == request.limit:
                    self.log.append(("end", request))
                    self.scheduler.finish(request)

    def launch(self, step):
        rows = list(step.decode)
        for request in step.decode:
            request.computed += 1
        for chunk in step.prefill:
            chunk.request.computed += chunk.length
            if chunk.start + chunk.length == chunk.request.length:
                for fork in chunk.forks:
                    fork.computed = chunk.request.computed
                rows += chunk.requests
        for request in rows:
            request.length += 1
        before, self.flight = self.flight, rows
        self.flight, rows = before, self.flight
        self.drain()
        self.flight = rows
        if not self.late:
            self.drain()

    def step(self):
        """One step, with everything that must be true of it."""
        scheduler = self.scheduler
        ready = [r for r in scheduler.running if r.decoding and not r.full]
        waiting, seen = list(scheduler.waiting), len(self.log)
        step = scheduler.schedule()
        evicted = {r for what, r in self.log[seen:] if what == "preempt"}
        took = [*step.decode, *(r for chunk in step.prefill for r in chunk.requests)]
        assert len(set(took)) == len(took)
        assert all(r.status == "running" and r.slot >= 0 for r in took)
        assert sum(chunk.length for chunk in step.prefill) <= scheduler.chunk_tokens
        for request in step.decode:
            assert request.decoding
        for chunk in step.prefill:
            one = chunk.request
            assert chunk.start == one.computed
            assert chunk.length > 0
            assert chunk.start + chunk.length <= one.length
            assert chunk.length > 1 or chunk.start == 0  # one token that continues a state is a decode step
        for request in took:
            assert len(request.pages) == self.pages.pages_for(request.length)
        for request in ready:  # no row that decodes is left out, but for want of room
            assert request in step.decode or request in evicted or request.finished
        back = [r for r in scheduler.waiting if r.preemptions or r.parent is not None]
        assert list(scheduler.waiting)[: len(back)] == back  # in front of who has not begun
        left = [r for r in waiting if r in scheduler.waiting]
        assert left == [r for r in scheduler.waiting if r in left]  # nobody overtakes
        gone = [r for r in waiting if r.status == "running"]
        assert gone == waiting[: len(gone)]  # first come, first served
        if not took:
            assert self.flight or not (scheduler.running or scheduler.waiting)
        self.pages.check()
        self.launch(step)
        return step

    def run(self, most=2000):
        for _ in range(most):
            if not (self.scheduler.running or self.scheduler.waiting or self.flight):
                break
            self.step()
        else:
            raise AssertionError(f"not done: {self.scheduler.running} {self.scheduler.waiting}")
        assert self.pages.free_pages == self.pages.pages
        assert len(self.slots._free) == self.slots.slots


REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 12), st.sampled_from([1, 1, 1, 3])), max_size=8
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    requests=REQUESTS, slots=st.integers(1, 5), more=st.integers(0, 8), chunk=st.integers(2, 30), late=st.booleans(),
    saved=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_everybody_is_served(requests, slots, more, chunk, late, saved, seed):
    """Requests of any size come at any time, end early or not, and every one of them ends with its slot and its pages
    given back; the steps keep the rules of `World.step`."""
    rng = random.Random(seed)
    ends = [(i, rng.randrange(3), rng.randrange(1, 12)) for i in range(len(requests)) if rng.random() < 0.5]
    world = World(slots, 8 + more, chunk, late, saved, ends)
    for steps, length, tokens, n in requests:
        for _ in range(steps):
            world.step()
        world.add(length, tokens, n)
    world.run()
    assert all(request.finished for request in world.made)
    assert len(world.made) == sum(request.params.n for request in world.roots)
    for request in world.made:
        stop = min((made for *who, made in ends if who == [request.id, request.index]), default=99)
        assert len(request.output) == min(stop, request.params.max_tokens)


def test_a_step_takes_no_more_tokens_of_prompts_than_it_may():
    world = World(slots=4, pages=40, chunk_tokens=7)
    first, second, third = world.add(10, 2), world.add(3, 2), world.add(9, 2)
    step = world.step()
    assert [(c.request, c.start, c.length) for c in step.prefill] == [(first, 0, 7)]
    step = world.step()
    assert [(c.request, c.start, c.length) for c in step.prefill] == [(first, 7, 3), (second, 0, 3)]
    step = world.step()  # one token of the last step was left, which is no chunk
    assert step.decode == [first, second]
    assert [(c.request, c.start, c.length) for c in step.prefill] == [(third, 0, 7)]
    step = world.step()
    assert [(c.request, c.start, c.length) for c in step.prefill] == [(third, 7, 2)]


def test_the_last_token_of_a_prompt_is_a_decode_step():
    world = World(chunk_tokens=7, pages=40)
    request = world.add(8, 2)
    assert [(c.start, c.length) for c in world.step().prefill] == [(0, 7)]
    assert request.output == []
    step = world.step()
    assert (step.decode, step.prefill) == ([request], [])
    assert request.output == [0]


def test_a_long_prompt_is_not_passed_by_short_ones():
    """It waits until its pages are free, and nobody who came later takes them."""
    world = World(slots=3, pages=8, chunk_tokens=50)
    running = world.add(4, 10)
    world.step()
    long, *short = world.add(24, 4), world.add(2, 2), world.add(2, 2)
    for _ in range(50):
        world.step()
        if long.status == "running":
            break
        assert all(one.status == "waiting" for one in short)
    assert long.status == "running"
    assert running.finished
    world.run()


def test_short_prompts_behind_a_long_one_share_its_steps():
    world = World(slots=3, pages=40, chunk_tokens=8)
    long, short = world.add(20, 1), world.add(5, 3)
    taken = [[(c.request, c.length) for c in world.step().prefill] for _ in range(3)]
    assert taken == [[(long, 8)], [(long, 8)], [(long, 4), (short, 4)]]
    assert world.step().decode == [short]


def test_the_youngest_makes_room_and_comes_back_first():
    world = World(slots=3, pages=6, chunk_tokens=50)
    old, middle, young = world.add(7, 5), world.add(7, 5), world.add(7, 5)
    later = world.add(1, 1)
    world.step()
    assert [r.status for r in (old, middle, young)] == ["running"] * 3
    world.step()
    world.step()  # the ninth token of each needs a third page
    assert (old.status, middle.status, young.status) == ("running", "running", "waiting")
    assert list(world.scheduler.waiting) == [young, later]
    assert young.preemptions == 1
    while young.status == "waiting":
        assert later.status == "waiting"
        world.step()
    world.run()
    assert (old.preemptions, middle.preemptions, young.preemptions) == (0, 0, 1)


def test_a_request_that_has_the_pool_for_itself_gets_all_of_it():
    world = World(slots=2, pages=4)
    first, second = world.add(3, 13), world.add(3, 13)
    world.run()
    assert first.preemptions == 0
    assert second.preemptions > 0
    assert (len(first.output), len(second.output)) == (13, 13)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_request_that_turns_out_to_have_ended_takes_no_page(tokens):
    """Tokens in flight are read before anybody is preempted; one of them may end the request that wants the page."""
    world = World(slots=2, pages=4, late=True, ends=[(0, 0, tokens)])
    first, second = world.add(7, 9), world.add(8, 8)
    world.run()
    assert (len(first.output), len(second.output)) == (tokens, 8)


def test_forks_share_whole_pages():
    world = World(slots=4, pages=12, chunk_tokens=50)
    parent = world.add(10, 4, n=3)
    (chunk,) = world.step().prefill
    assert [fork.index for fork in chunk.forks] == [1, 2]
    assert [fork.pages[:2] for fork in chunk.forks] == [parent.pages[:2]] * 2
    assert len({r.pages[2] for r in chunk.requests}) == 3
    assert world.pages.used_pages == 5
    world.run()


@pytest.mark.parametrize("chunk_tokens", [2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
def test_forks_are_made_whatever_the_chunks(length, chunk_tokens):
    """Also where the last chunk has one token, and where there is room in the step behind it."""
    world = World(slots=4, pages=20, chunk_tokens=chunk_tokens)
    world.add(length, 3, n=4)
    world.run()
    assert sorted(r.index for r in world.made) == [0, 1, 2, 3]
    assert all(len(r.output) == 3 for r in world.made)


def test_forks_without_room_compute_the_prompt_themselves_in_order():
    world = World(slots=2, pages=20, chunk_tokens=50)
    parent, other = world.add(5, 3, n=4), world.add(2, 1)
    (chunk,) = world.step().prefill
    assert [fork.index for fork in chunk.forks] == [1]
    assert [(r.id, r.index) for r in world.scheduler.waiting] == [(0, 2), (0, 3), (other.id, 0)]
    world.run()
    assert parent.unforked == 0
