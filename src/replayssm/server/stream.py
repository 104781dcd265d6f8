"""Answers that end when their client does: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from replayssm.server.desk import Gone, Ticket
from replayssm.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(value: Any) -> bytes:
    """One event; UTF-8 whole, since it is made of a text."""
    return b"data: " + dump(value) + b"\n\n"


def dump(value: Any) -> bytes:
    """JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


@asynccontextmanager
async def watched(ticket: Ticket, receive: Receive) -> AsyncIterator[None]:
    """Tell the ticket when its client goes away; close it at the end in any case."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.leave()

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        ticket.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def whole(ticket: Ticket, receive: Receive, build: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    """What `build` makes of a ticket, as one JSON object."""
    async with watched(ticket, receive):
        try:
            return JSONResponse(await build())
        except Gone:
            return Response(status_code=499)  # nobody reads it
        except RuntimeError as error:
            raise ApiError(503, str(error), None, "engine_stopped") from None


class EventStream(Response):
    """Sends what `events` yields, batches of chunks, and [DONE]. An error on the way is an event."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._ticket, self._events = ticket, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client goes away."""
        async with watched(self._ticket, receive), contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Gone:
                return
            except ApiError as error:
                await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
            except RuntimeError as error:
                told = ApiError(503, str(error), None, "engine_stopped")
                await send({"type": "http.response.body", "body": event(told.body()), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
