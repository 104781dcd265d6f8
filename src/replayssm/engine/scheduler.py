"""Who runs in the next step: first come, first served, and every request that decodes goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from replayssm.engine.request import Request
from replayssm.state import PagePool, SlotPool


@dataclass
class Chunk:
    """Tokens [start, start + length) of a prompt; `forks` take a copy of the state behind it."""

    request: Request
    start: int
    length: int
    forks: list[Request] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """The one that computes the chunk, and its forks."""
        return [self.request, *self.forks]

    @property
    def last(self) -> bool:
        """Whether the prompt ends here, so that a token is sampled."""
        return self.start + self.length == self.request.length


@dataclass
class Step:
    """What one step computes: one token of each request that decodes, and chunks of prompts."""

    decode: list[Request] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    """Requests wait in order of arrival; a preempted one goes back to the front.

    `preempt(request)` must take slot and pages off a running request; `restore(request)` undoes it for one that was
    saved; `drain()` waits for tokens in flight, after which some requests may have finished; `adopt(request)` hears of
    every fork.
    """

    def __init__(
        self,
        slots: SlotPool,
        pages: PagePool,
        chunk_tokens: int,
        preempt: Callable[[Request], None],
        restore: Callable[[Request], None],
        drain: Callable[[], None],
        adopt: Callable[[Request], None],
    ) -> None:
        self.slots, self.pages, self.chunk_tokens = slots, pages, chunk_tokens
        self.preempt, self.restore, self.drain, self.adopt = preempt, restore, drain, adopt
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def schedule(self) -> Step:
        """The next step, slots and pages of its tokens allocated. Empty when there is nothing to do."""
        step, budget = Step(), self.chunk_tokens
        for request in list(self.running):
            ready = request.status == "running" and request.decoding and not request.full
            if ready and self._make_room(request):
                step.decode.append(request)
        step.decode = [r for r in step.decode if r.status == "running" and r.decoding]
        for request in self.running:
            if budget > 1 and not request.decoding:
                budget -= self._chunk(step, request, budget)
        while budget > 1 and self.waiting and self._can_admit(self.waiting[0]):
            request = self._admit(self.waiting.popleft())
            if request.decoding:
                step.decode.append(request)
            elif request.pending:
                budget -= self._chunk(step, request, budget)
        return step

    def _make_room(self, request: Request) -> bool:
        """A page for the request's next token, if need be from the youngest request. False when that is itself."""
        while len(request.pages) < self.pages.pages_for(request.length):
            if self.pages.can_allocate():
                request.pages += self.pages.allocate()
                continue
            self.drain()
            if self.pages.can_allocate():
                continue
            youngest = self.running[-1]
            self._evict(youngest)
            if youngest is request:
                break
        return request.status == "running"

    def _evict(self, request: Request) -> None:
        self.running.remove(request)
        self.preempt(request)
        request.status = "waiting"
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _can_admit(self, request: Request) -> bool:
        # a page for the first new token, too: a request that is admitted can make at least one step
        return self.slots.can_allocate() and self.pages.can_allocate(self.pages.pages_for(request.length + 1))

    def _admit(self, request: Request) -> Request:
        (request.slot,) = self.slots.allocate(owner=request)
        request.pages = self.pages.allocate(self.pages.pages_for(request.length))
        request.status = "running"
        self.running.append(request)
        if request.saved is not None:
            self.restore(request)
        return request

    def _chunk(self, step: Step, request: Request, budget: int) -> int:
        """Add what fits of a prompt; returns its tokens."""
        length = min(request.pending, budget)
        chunk = Chunk(request, request.computed, length)
        step.prefill.append(chunk)
        if chunk.last and request.unforked:
            self._fork(chunk)
        return length

    def _fork(self, chunk: Chunk) -> None:
        """Give the other outputs of a prompt a copy of its state; those that find no room compute it themselves."""
        parent = chunk.request
        full = len(parent.prompt) // self.pages.page_size
        for index in range(1, parent.unforked + 1):
            child = parent.fork(index)
            self.adopt(child)
            own = len(parent.pages) - full
            # what the others of this step still need was allocated already
            if self.slots.can_allocate() and self.pages.can_allocate(own):
                (child.slot,) = self.slots.allocate(owner=child)
                child.pages = self.pages.share(parent.pages[:full]) + self.pages.allocate(own)
                child.status = "running"
                chunk.forks.append(child)
                self.running.append(child)
            else:
                self.waiting.appendleft(child)
        parent.unforked = 0

    def release(self, request: Request) -> None:
        """Give back slot and pages of a request that ends or is preempted."""
        if request.slot >= 0:
            self.slots.free([request.slot])
            self.pages.free(request.pages)
            request.slot, request.pages, request.synced = -1, [], 0

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if request.status == "waiting" and request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
        self.release(request)
        request.saved = None
        request.status = "finished"
