"""Who runs in the next step: first come, first served, and every request that decodes goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from replayssm.engine.request import Request
from replayssm.state import PagePool, SlotPool
from replayssm.state.prefix import Match, PrefixCache


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
        prefix: PrefixCache | None = None,
        prefix_interval: int = 0,
        prefix_buffers: int = 0,
    ) -> None:
        self.slots, self.pages, self.chunk_tokens = slots, pages, chunk_tokens
        self.preempt, self.restore, self.drain, self.adopt = preempt, restore, drain, adopt
        self.prefix, self.prefix_interval, self.prefix_buffers = prefix, prefix_interval, prefix_buffers
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def schedule(self) -> Step:
        """The next step, slots and pages of its tokens allocated. Empty when there is nothing to do."""
        step, budget = Step(), self.chunk_tokens
        for request in list(self.running):
            ready = request.status == "running" and request.decoding and not request.full
            if ready and self._make_room(request):
                self._decode(step, request)
        step.decode = [r for r in step.decode if r.status == "running" and r.decoding]
        for request in list(self.running):  # forks join it on the way
            if budget > 1 and not request.decoding:
                budget -= self._chunk(step, request, budget)
        while budget > 1 and self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            if request.decoding:
                self._decode(step, request)
            elif request.pending:
                budget -= self._chunk(step, request, budget)
        return step

    def _decode(self, step: Step, request: Request) -> None:
        """Add a decode row. Where it is the last token of a prompt, the other outputs compute the prompt themselves."""
        step.decode.append(request)
        if request.unforked:
            self._fork(request)

    def _can_take(self, pages: int) -> bool:
        """Whether so many pages are free, if need be after the prefix cache gave some up."""
        short = pages - self.pages.free_pages
        if short > 0 and self.prefix is not None:
            self.prefix.evict_pages(short)
        return self.pages.can_allocate(pages)

    def _make_room(self, request: Request) -> bool:
        """A page for the request's next token, if need be from the youngest request. False when that is itself."""
        while request.status == "running" and len(request.pages) < self.pages.pages_for(request.length):
            if self._can_take(1):
                request.pages += self.pages.allocate()
                continue
            self.drain()
            if self._can_take(1) or request.status != "running":
                continue
            youngest = self.running[-1]
            self._evict(youngest)
        return request.status == "running"

    def stretch(self, request: Request, tokens: int) -> int:
        """Pages for up to `tokens` more tokens of a running request, from those that nobody uses; how many fit."""
        fits = (len(request.pages) + self.pages.free_pages) * self.pages.page_size - request.length
        tokens = max(0, min(tokens, fits))
        request.pages += self.pages.allocate(max(0, self.pages.pages_for(request.length + tokens) - len(request.pages)))
        return tokens

    def _evict(self, request: Request) -> None:
        self.running.remove(request)
        self.preempt(request)
        request.status = "waiting"
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot and pages, with what was computed of it before. False when it must wait on."""
        if not self.slots.can_allocate():
            return False
        match, locked = Match(0, None, 0), list[int]()
        if self.prefix is not None and request.saved is None:
            # the last token is computed in any case: its logits are wanted
            match = self.prefix.match(request.tokens, request.length - 1)
            locked = self.prefix.lock(match)
        # a page for the first new token, too: a request that is admitted can make at least one step
        needed = self.pages.pages_for(request.length + 1)
        if not self._can_take(needed - match.depth // self.pages.page_size):
            self.pages.free(locked)
            # a tail costs a page besides; where nothing runs that could make room for it, do without
            if self.running or not self._can_take(needed):
                return False
            match, locked = Match(0, None, 0), []
        (request.slot,) = self.slots.allocate(owner=request)
        if self.prefix is not None:
            request.pages = self.prefix.adopt(match, locked, request.slot)
            request.buffers = self.prefix.reserve(self.prefix_buffers)
            if not request.preemptions:
                request.cached_tokens = match.depth
                self.prefix.count(request.length, match)
        request.computed = match.depth
        request.pages += self.pages.allocate(self.pages.pages_for(request.length) - len(request.pages))
        request.status = "running"
        self.running.append(request)
        if request.saved is not None:
            self.restore(request)
        return True

    def _chunk(self, step: Step, request: Request, budget: int) -> int:
        """Add what fits of a prompt; returns its tokens."""
        length = self._cut(request, min(request.pending, budget))
        if request.unforked and request.pending - length == 1 and length > 2:
            length -= 1  # one token alone would be a decode step, which hands its state to no fork
        chunk = Chunk(request, request.computed, length)
        step.prefill.append(chunk)
        if chunk.last and request.unforked:
            self._fork(request, chunk)
        return length

    def _cut(self, request: Request, length: int) -> int:
        """End a chunk where a state is worth keeping: at a multiple of the interval, and at the last one of a prompt.

        One token that continues a state is a decode step, so no chunk has less than two.
        """
        if self.prefix is None:
            return length
        end = request.computed + length
        kept = min(end, request.length - 1) // self.prefix_interval * self.prefix_interval - request.computed
        return kept if kept > 1 else length

    def _fork(self, parent: Request, chunk: Chunk | None = None) -> None:
        """Make the other outputs of a prompt. They take a copy of the state behind its last chunk; those that find no
        room for it compute it themselves."""
        full = len(parent.prompt) // self.pages.page_size
        own = len(parent.pages) - full
        left: list[Request] = []
        for index in range(1, parent.unforked + 1):
            child = parent.fork(index)
            self.adopt(child)
            # what the others of this step still need was allocated already
            if chunk is not None and self.slots.can_allocate() and self._can_take(own):
                (child.slot,) = self.slots.allocate(owner=child)
                child.pages = self.pages.share(parent.pages[:full]) + self.pages.allocate(own)
                child.status = "running"
                chunk.forks.append(child)
                self.running.append(child)
            else:
                left.append(child)
        self.waiting.extendleft(reversed(left))
        parent.unforked = 0

    def release(self, request: Request) -> None:
        """Give back slot and pages of a request that ends or is preempted."""
        if request.slot >= 0:
            self.slots.free([request.slot])
            self.pages.free(request.pages)
            if self.prefix is not None:
                self.prefix.give_back(request.buffers)
            request.slot, request.pages, request.buffers, request.synced = -1, [], [], 0

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if request.status == "waiting" and request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
        self.release(request)
        request.saved = None
        request.status = "finished"
