"""Servers in a thread of this process, so that a test can look at the engine behind them; small HTTP clients."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from openai import OpenAI

from replayssm.engine.options import EngineOptions
from replayssm.models.loading import LoadedModel, load_model
from replayssm.server.options import ServerOptions
from replayssm.server.run import Server
from tests.cli.conftest import EOS, byte_tokenizer
from tests.engine.common import as_loaded, assert_idle
from tests.models.tiny import config_of

PATIENCE = 60.0
ENGINE = {"max_requests": 4, "context": 256, "page_size": 8, "memory": 2**30, "mode": "replay", "chunk_tokens": 64}


@functools.cache
def bytes_model() -> LoadedModel:
    """Random, with a token for each byte."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    config = config_of("qwen3_5_text", vocab_size=EOS + 1, eos_token_id=EOS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return as_loaded(model, byte_tokenizer())


@functools.cache
def shipped(name: str = "gdn") -> LoadedModel:
    return load_model(name, device="cpu")


class Running(NamedTuple):
    """A server that answers."""

    server: Server
    url: str

    @property
    def engine(self):
        return self.server.service.engine

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None):
        return call(self.port, path, body, headers, method)

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def wait_idle(self) -> None:
        """Until nothing runs; then nothing may be lost."""
        until(lambda: self.engine.idle)
        until(lambda: self.server.service.desk.outputs == 0)
        until(lambda: not self.server.service.desk._streams)
        assert_idle(self.engine)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        return found["error"]


def until(true, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)


@contextlib.contextmanager
def serving(model: LoadedModel | None = None, engine: dict | None = None, load=None, ready=True, **options):
    """A running server; afterwards it is stopped, and must have lost nothing."""
    loaded = model or bytes_model()
    server = Server(
        load or (lambda: loaded),
        "tiny",
        ServerOptions(port=0, **options),
        EngineOptions(**{**ENGINE, **(engine or {})}),
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    running = Running(server, server.url)
    try:
        if ready:
            until(lambda: server.service.phase != "loading")
            assert server.service.phase == "ready", server.service.failure
        yield running
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def call(port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None):
    """Bytes go as they are, anything else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **(headers or {})} if raw is not None else headers or {}
    try:
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, sent)
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode())
    finally:
        connection.close()


def request_bytes(path: str, body: Any, **headers: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + raw


def connect(port: int, path: str, body: Any, buffer: int | None = None) -> socket.socket:
    """A request on a socket of its own, to be read slowly or dropped."""
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(PATIENCE)
    made.connect(("127.0.0.1", port))
    made.sendall(request_bytes(path, body))
    return made


def events(text: str) -> list[dict[str, Any]]:
    """Of an event stream that ended as it should."""
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def exactly(text: str) -> dict[str, str]:
    """A response_format that makes the model say a text."""
    escaped = (c if not c.isascii() or c.isalnum() or c == " " else re.escape(c) for c in text)
    return {"type": "regex", "regex": "".join(escaped)}


def said(chunks: list[dict[str, Any]], index: int = 0) -> str:
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)


def iterate(socket_: socket.socket) -> Iterator[bytes]:
    while part := socket_.recv(65536):
        yield part


def template_file(folder: Path, text: str) -> Path:
    file = folder / "template.jinja"
    file.write_text(text, encoding="utf-8")
    return file
