"""What every request passes: the key, the size and time of its body, a count of what was answered."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayssm.server.errors import ApiError
from replayssm.server.service import Service

OPEN = ("/", "/health")  # need no key: the page asks for it, and a probe has none


class Guard:
    """ASGI middleware of a service. `known` says which paths get a count of their own."""

    def __init__(self, app: ASGIApp, service: Service, known: Callable[[], frozenset[str]]) -> None:
        self.app, self.service, self.known = app, service, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start" and not started:
                started = True
                path = scope["path"] if scope["path"] in self.known() else "other"
                self.service.responses[path, message["status"]] += 1
            await send(message)

        try:
            self._check(scope)
            body = await self._body(receive)
        except ApiError as error:
            await error.response()(scope, receive, counted)
            return
        if body is None:
            return
        given = False

        async def replayed() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replayed, counted)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        key = self.service.options.api_key
        if key is not None and scope["path"] not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
                raise ApiError(
                    401, "the API key is missing or wrong; send 'Authorization: Bearer KEY'", None, "invalid_api_key"
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.service.options.max_body:
            raise self._too_large()

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None when the client went away before it was sent."""
        parts, size = [], 0
        deadline = asyncio.get_running_loop().time() + self.service.options.body_seconds
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0.001))
            except TimeoutError:
                seconds = self.service.options.body_seconds
                raise ApiError(408, f"the request was not sent within {seconds} s", None, "timeout") from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.service.options.max_body:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        most = self.service.options.max_body
        return ApiError(413, f"the body exceeds {most} bytes; send less, or raise --max-body", None, "body_too_large")
