"""Load for a server with OpenAI's endpoints: streams by the clock, one row for each load. Needs no torch.

kind, load                        "concurrency" or "rate" (a second; null is all at once), and how much
requests, completed, failures     sent, ended well, and how many failed why
seconds                           from the first one sent to the last one ended
prompt_tokens, output_tokens      of those that ended well, by the server's count ("counted": "usage") or, where it
                                  sends none, output chunks ("chunks")
requests_per_s, output_tokens_per_s
ttft_ms, tpot_ms, itl_ms, e2el_ms from sending to the first text, per token after it, between chunks of text, to the
                                  end: {mean, median, p99} in milliseconds; null without values
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import h11

from replayssm.bench.client_data import Prompt
from replayssm.bench.client_request import ClientRequest, Load
from replayssm.bench.serving_stats import gaps, summary

MOST_READ = 2**16


class Failed(Exception):
    """A request that did not end well; the text is short, since failures are counted by it."""


@dataclass
class Outcome:
    """Of one request. `times` are those of chunks with text, `tokens` what the server counted."""

    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    failure: str | None = None


async def http(
    request: ClientRequest, method: str, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator[tuple[int, bytes]]:
    """Status, and parts of the body as they come; a connection of its own."""
    context = ssl.create_default_context() if request.tls else None
    reader, writer = await asyncio.open_connection(request.host, request.port, ssl=context)
    try:
        raw = b"" if body is None else json.dumps(body).encode()
        headers = [("host", request.host), ("accept", "*/*"), ("connection", "close")]
        headers += [("content-type", "application/json"), ("content-length", str(len(raw)))] if raw else []
        headers += [("authorization", f"Bearer {request.key}")] if request.key else []
        connection = h11.Connection(h11.CLIENT)
        head = h11.Request(method=method, target=request.base + path, headers=headers)
        sent = [head, *([h11.Data(data=raw)] if raw else []), h11.EndOfMessage()]
        writer.write(b"".join(connection.send(one) or b"" for one in sent))
        await writer.drain()
        status = 0
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(MOST_READ))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                yield status, bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                yield status, b""
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise Failed("connection closed")
    finally:
        writer.close()


async def model_of(request: ClientRequest) -> str:
    """The first model that the server names."""
    parts, status = [], 0
    async for status, part in http(request, "GET", "/v1/models"):  # noqa: B007
        parts.append(part)
    try:
        return str(json.loads(b"".join(parts))["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise Failed(f"/v1/models answers {status} and names no model; say --model") from None


async def ask(request: ClientRequest, model: str, prompt: Prompt) -> Outcome:
    """One request, to its end or its failure."""
    found = Outcome(time.perf_counter())
    try:
        async with asyncio.timeout(request.args.timeout):
            await _stream(request, request.body(prompt, model), found)
    except TimeoutError:
        found.failure = "timeout"
    except Failed as error:
        found.failure = str(error)
    except h11.ProtocolError:
        found.failure = "broken HTTP"
    except OSError as error:
        found.failure = error.strerror or type(error).__name__
    found.end = time.perf_counter()
    return found


async def _stream(request: ClientRequest, body: dict[str, Any], found: Outcome) -> None:
    path = "/v1/chat/completions" if request.endpoint == "chat" else "/v1/completions"
    held, finished = b"", False
    async for status, part in http(request, "POST", path, body):
        held += part
        if status != 200:
            if not part:
                raise Failed(f"HTTP {status}")
            continue
        *lines, held = held.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                finished |= _chunk(line[5:], found)
    if not finished:
        raise Failed("the stream ended without a finish reason")


def _chunk(raw: bytes, found: Outcome) -> bool:
    """Note one chunk; whether it has a finish reason."""
    try:
        chunk = json.loads(raw)
        if "error" in chunk:
            raise Failed("error in the stream")
        finished, text = False, ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            # thinking models stream their thoughts under a name of their own
            text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            finished |= choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            found.prompt_tokens, found.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    except (ValueError, AttributeError, LookupError, TypeError):
        raise Failed("a chunk that is not OpenAI's") from None
    if text:
        found.times.append(time.perf_counter())
        found.text += text
    return finished


async def run(request: ClientRequest, load: Load, model: str) -> list[Outcome]:
    """All requests at one load."""
    prompts = request.prompts(load)
    if load.kind == "concurrency":
        waiting = iter(prompts)
        found: list[Outcome] = []

        async def worker() -> None:
            for prompt in waiting:
                found.append(await ask(request, model, prompt))

        await asyncio.gather(*(worker() for _ in range(min(int(load.value), len(prompts)))))
        return found
    start, at, draw, tasks = time.perf_counter(), 0.0, random.Random(request.args.seed), []
    for prompt in prompts:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(request, model, prompt)))
        if not math.isinf(load.value):
            at += draw.expovariate(load.value)
    return list(await asyncio.gather(*tasks))


def row_of(load: Load, outcomes: list[Outcome]) -> dict[str, Any]:
    """See the top."""
    good = [one for one in outcomes if one.failure is None]
    seconds = max(one.end for one in outcomes) - min(one.start for one in outcomes)
    usage = bool(good) and all(one.tokens is not None for one in good)
    tokens = [one.tokens if usage and one.tokens is not None else len(one.times) for one in good]
    prompt_tokens = sum(one.prompt_tokens or 0 for one in good) if usage else None
    heard = [(one, n) for one, n in zip(good, tokens, strict=True) if one.times]
    return {
        "kind": load.kind,
        "load": None if math.isinf(load.value) else load.value,
        "requests": len(outcomes),
        "completed": len(good),
        "failures": dict(Counter(one.failure for one in outcomes if one.failure is not None)),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(tokens),
        "counted": "usage" if usage else "chunks",
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": sum(tokens) / seconds,
        "ttft_ms": summary([one.times[0] - one.start for one, _ in heard]),
        "tpot_ms": summary([(one.times[-1] - one.times[0]) / (n - 1) for one, n in heard if n > 1]),
        "itl_ms": summary([gap for one, _ in heard for gap in gaps(one.times)]),
        "e2el_ms": summary([one.end - one.start for one in good]),
    }
