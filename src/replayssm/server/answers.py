"""Outputs of the engine in OpenAI's shapes, as they grow or when they are whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

from replayssm.engine.request import Logprob, Reason, Request
from replayssm.server.desk import Piece, Ticket
from replayssm.server.errors import ApiError
from replayssm.server.service import Service
from replayssm.server.stream import event
from replayssm.server.tools import Call, CallReader

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class Choice:
    """One output so far."""

    text: str = ""
    tokens: int = 0
    logprobs: int = 0  # that were handed out
    offset: int = 0  # of the next token's text, in completions
    reason: str | None = None
    reader: CallReader | None = None
    calls: list[Call] = field(default_factory=list)


@dataclass
class More:
    """What came to one choice: text, calls and logprobs that no one has seen yet."""

    index: int
    text: str
    calls: list[Call]
    logprobs: list[Logprob]
    reason: str | None


class Answer:
    """What both endpoints share.

    Args:
        service, ticket: where outputs come from.
        usage: whether a stream ends with the tokens counted.
        readers: one for each choice, where tools may be called.
    """

    object_name = ""
    chunk_name = ""
    prefix = ""

    def __init__(
        self, service: Service, ticket: Ticket, usage: bool = False, readers: list[CallReader] | None = None
    ) -> None:
        self.service, self.ticket, self.usage = service, ticket, usage
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        count = sum(root.params.n for root in ticket.roots)
        self.choices = [Choice(reader=readers[i] if readers else None) for i in range(count)]

    async def build(self) -> dict[str, Any]:
        """The whole answer. Raises `ApiError` when an output failed."""
        parts: list[list[Logprob]] = [[] for _ in self.choices]
        while pieces := await self.ticket.pieces():
            for more in self._take(pieces):
                choice = self.choices[more.index]
                choice.text += more.text
                choice.calls += more.calls
                parts[more.index] += more.logprobs
        choices = [self.choice(i, choice, parts[i]) for i, choice in enumerate(self.choices)]
        return {**self._head(self.object_name), "choices": choices, "usage": self.counted()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks; those that came together are sent together."""
        head = self._head(self.chunk_name) | ({"usage": None} if self.usage else {})
        if first := [event({**head, "choices": [part]}) for part in self.opening()]:
            yield b"".join(first)
        while pieces := await self.ticket.pieces():
            made = [event({**head, "choices": [part]}) for more in self._take(pieces) for part in self.delta(more)]
            if made:
                yield b"".join(made)
        if self.usage:
            yield event({**head, "choices": [], "usage": self.counted()})

    def counted(self) -> dict[str, Any]:
        """Tokens of prompts and outputs."""
        prompt = sum(len(root.prompt) for root in self.ticket.roots)
        made = sum(choice.tokens for choice in self.choices)
        cached = sum(root.cached_tokens for root in self.ticket.roots)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def opening(self) -> Iterable[dict[str, Any]]:
        """Chunks before the first token."""
        return ()

    def delta(self, more: More) -> Iterable[dict[str, Any]]:
        """Chunks of what came."""
        raise NotImplementedError

    def choice(self, index: int, choice: Choice, logprobs: list[Logprob]) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.service.name}

    def _take(self, pieces: list[Piece]) -> list[More]:
        """Pieces by choice, in order; text that may yet be a call is held back."""
        texts: dict[int, list[str]] = {}
        last: dict[int, Piece] = {}
        for piece in pieces:
            texts.setdefault(piece.choice, []).append(piece.text)
            last[piece.choice] = piece
        return [self._more(index, "".join(texts[index]), piece) for index, piece in last.items()]

    def _more(self, index: int, text: str, piece: Piece) -> More:
        choice, request = self.choices[index], piece.request
        choice.tokens = piece.tokens
        if piece.reason in ("error", "abort"):
            raise _failed(request, piece.reason)
        calls: list[Call] = []
        if choice.reader is not None:
            text, calls = choice.reader.feed(text)
            if piece.reason is not None:
                text += choice.reader.finish()
        logprobs: list[Logprob] = []
        if request.params.logprobs is not None:
            logprobs = request.logprobs[choice.logprobs : piece.tokens]
            choice.logprobs += len(logprobs)
        if piece.reason is not None:
            called = choice.reader is not None and choice.reader.calls and piece.reason == "stop"
            choice.reason = "tool_calls" if called else piece.reason
        return More(index, text, calls, logprobs, choice.reason)


class CompletionAnswer(Answer):
    """`/v1/completions`; `echo` has the text of each prompt, to come before its outputs."""

    object_name = chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, service: Service, ticket: Ticket, usage: bool, echo: list[str] | None) -> None:
        super().__init__(service, ticket, usage)
        each = [root.params.n for root in ticket.roots]
        texts = echo or [""] * len(each)
        self._echo = [text for text, n in zip(texts, each, strict=True) for _ in range(n)]
        for choice, text in zip(self.choices, self._echo, strict=True):
            choice.offset = len(text)

    def opening(self) -> Iterable[dict[str, Any]]:
        """The prompts, where they are wanted."""
        return [self._part(i, text, None, None) for i, text in enumerate(self._echo) if text]

    def delta(self, more: More) -> Iterable[dict[str, Any]]:
        """One chunk, unless there is nothing in it."""
        if not (more.text or more.logprobs or more.reason):
            return ()
        return (self._part(more.index, more.text, self._logprobs(more.index, more.logprobs), more.reason),)

    def choice(self, index: int, choice: Choice, logprobs: list[Logprob]) -> dict[str, Any]:
        """With the prompt before it."""
        return self._part(index, self._echo[index] + choice.text, self._logprobs(index, logprobs), choice.reason)

    def _part(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, found: list[Logprob]) -> dict[str, Any] | None:
        asked = self.ticket.roots[0].params.logprobs
        if asked is None:
            return None
        tokens = [_text(self.service, one.token) for one in found]
        offsets = []
        for token in tokens:
            offsets.append(self.choices[index].offset)
            self.choices[index].offset += len(token)
        top = [{_text(self.service, token): _number(value) for token, value in one.top} for one in found]
        return {
            "tokens": tokens,
            "token_logprobs": [_number(one.logprob) for one in found],
            "top_logprobs": top if asked else None,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self) -> Iterable[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [self._part(i, delta, None, None) for i in range(len(self.choices))]

    def delta(self, more: More) -> Iterable[dict[str, Any]]:
        """What is said, calls, and the end, each in a chunk of its own."""
        choice, chunks = self.choices[more.index], []
        if more.text or more.logprobs:
            logprobs = self._logprobs(more.logprobs)
            chunks.append(self._part(more.index, {"content": more.text}, logprobs, None))
        for call in more.calls:
            index = len(choice.calls)
            choice.calls.append(call)
            chunks.append(self._part(more.index, {"tool_calls": [call.as_json(index)]}, None, None))
        if more.reason is not None:
            chunks.append(self._part(more.index, {}, None, more.reason))
        return chunks

    def choice(self, index: int, choice: Choice, logprobs: list[Logprob]) -> dict[str, Any]:
        """With its message."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["tool_calls"] = [call.as_json() for call in choice.calls]
            message["content"] = choice.text or None
        found = self._logprobs(logprobs)
        return {"index": index, "message": message, "logprobs": found, "finish_reason": choice.reason}

    def _part(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, found: list[Logprob]) -> dict[str, Any] | None:
        asked = self.ticket.roots[0].params.logprobs
        if asked is None:
            return None
        content = [
            {
                **self._token(one.token, one.logprob),
                "top_logprobs": [self._token(*pair) for pair in one.top[:asked]],
            }
            for one in found
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.service.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _number(logprob), "bytes": list(raw)}


def _text(service: Service, token: int) -> str:
    return service.token_bytes(token).decode(errors="replace")


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _failed(request: Request, reason: Reason) -> ApiError:
    if reason == "abort":
        return ApiError(503, "the server is shutting down", None, "aborted")
    return ApiError(500, f"the request failed: {request.error}", None, "request_failed")
