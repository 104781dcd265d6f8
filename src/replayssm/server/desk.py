"""Between an event loop and the engine's thread: requests go one way, what is new of their outputs comes the other.

The engine's thread leaves what a step made in one queue and rings once; the loop hands it on in one go. A reader that
is slow finds more in its ticket and holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from replayssm.engine.llm import AsyncLLM
from replayssm.engine.request import Reason, Request

RECENT = 32  # requests whose time tells how long a place in the queue takes


class Piece(NamedTuple):
    """More of one output: text, `tokens` of it so far, and how it ended, if it has."""

    choice: int
    request: Request
    text: str
    tokens: int
    reason: Reason | None


class Gone(Exception):
    """Nobody waits for the answer any more."""


class Desk(AsyncLLM):
    """An `AsyncLLM` whose readers get pieces."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._made: deque[tuple[Ticket, Piece]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.outputs = 0  # that were opened and have not ended
        super().__init__(*args, **options)  # starts the thread

    def open(self, roots: Sequence[Request]) -> Ticket:
        """Submit requests; their outputs are the choices 0, 1, … in order. Close the ticket in any case."""
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(self, roots)
        self.outputs += ticket.open
        try:
            for i, root in enumerate(roots):
                self._send("add", root, ticket.part(i))
        except BaseException:
            ticket.close()
            raise
        return ticket

    def wait_estimate(self) -> float:
        """Seconds until one more output may start, from the time that recent requests took."""
        recent = list(self._seconds)
        ahead = max(0, self.outputs - self.engine.plan.slots) + 1
        each = sum(recent) / len(recent) if recent else 1.0
        return min(60.0, each * ahead / self.engine.plan.slots)

    def check(self) -> None:
        """Raise `RuntimeError` when the engine has stopped."""
        self._check()

    def post(self, ticket: Ticket, piece: Piece) -> None:
        """From the engine's thread."""
        self._made.append((ticket, piece))

    def _stepped(self) -> None:
        if self._made and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._made:
            ticket, piece = self._made.popleft()
            ticket.take(piece)

    def ended(self, ticket: Ticket) -> None:
        """A ticket was closed; what runs for it stops."""
        self.outputs -= ticket.open
        for root in ticket.roots:
            self._streams.pop(root, None)
            if ticket.runs(root):
                with contextlib.suppress(RuntimeError):
                    self._send("abort", root)
        if not ticket.open:
            self._seconds.append(time.perf_counter() - ticket.start)


class Ticket:
    """What one HTTP request gets of its outputs.

    Attributes:
        roots: its prompts; root i has the choices n·i … n·i + n-1.
        open: outputs that have not ended.
    """

    def __init__(self, desk: Desk, roots: Sequence[Request]) -> None:
        self.desk, self.roots, self.loop = desk, list(roots), asyncio.get_running_loop()
        self.start = time.perf_counter()
        self.open = sum(root.params.n for root in roots)
        self._left = {root: root.params.n for root in roots}
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._gone = self._closed = False

    def part(self, i: int) -> Any:
        """A stream of `AsyncLLM` for root i."""
        return _Part(self, i)

    def take(self, piece: Piece) -> None:
        """In the loop: one more piece."""
        if self._closed:
            return
        if piece.reason is not None:
            root = piece.request.parent or piece.request
            ended = 1 if root.outputs == root.params.n else self._left[root]  # what never forked ends for all
            self._left[root] -= ended
            self.open -= ended
            self.desk.outputs -= ended
        self._pieces.append(piece)
        self._news.set()

    def wake(self) -> None:
        """Look whether the engine still runs."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._news.set)

    def leave(self) -> None:
        """The client went away: whoever waits in `pieces` hears of it."""
        self._gone = True
        self._news.set()

    async def pieces(self) -> list[Piece]:
        """What is new, at least one piece; empty when all outputs have ended and were handed out. Raises `Gone`, or
        `RuntimeError` when the engine stopped."""
        while True:
            if self._gone:
                raise Gone
            if self._pieces:
                found, self._pieces = self._pieces, []
                return found
            if not self.open:
                return []
            self.desk.check()
            self._news.clear()
            await self._news.wait()

    def runs(self, root: Request) -> bool:
        """Whether outputs of a root have not ended."""
        return self._left[root] > 0

    def close(self) -> None:
        """Stop what still runs."""
        if not self._closed:
            self._closed = True
            self.desk.ended(self)


class _Part:
    """What `AsyncLLM` knows of a root: a listener, and how to wake its reader."""

    def __init__(self, ticket: Ticket, i: int) -> None:
        self.wake = ticket.wake
        self.listener = partial(_listen, ticket, ticket.roots[i].params.n * i)


def _listen(ticket: Ticket, first: int, request: Request, text: str) -> None:
    piece = Piece(first + request.index, request, text, len(request.tokens) - len(request.prompt), request.reason)
    ticket.desk.post(ticket, piece)
