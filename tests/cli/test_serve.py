"""The command as a process: what it says, that it answers, and how it leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from replayssm.cli.serve import decode_route
from tests.engine.common import engine_of
from tests.server.common import PATIENCE, call, connect, events

SMALL = ("--memory", "1GiB", "--max-requests", "4", "--device", "cpu", "--context", "256")


@contextmanager
def process(*words, **env):
    made = subprocess.Popen(
        [sys.executable, "-m", "replayssm.cli", "serve", *map(str, words)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(made.stderr), daemon=True)
    reader.start()
    try:
        yield made, errors
    finally:
        made.kill()
        made.wait(PATIENCE)
        reader.join(PATIENCE)


def port_of(line: str) -> int:
    return int(line.partition("http://127.0.0.1:")[2].partition("/")[0])


def test_it_says_what_it_does_answers_and_drains(saved):
    with process(saved, "--port", 0, "--prefix-cache", "--served-name", "tiny", *SMALL) as (made, errors):
        line = made.stdout.readline()
        assert line.startswith("ready: tiny at http://127.0.0.1:")
        port = port_of(line)
        assert call(port, "/v1/models").json["data"][0]["id"] == "tiny"
        body = {"prompt": "x", "max_tokens": 240, "temperature": 0, "ignore_eos": True}
        whole = call(port, "/v1/completions", body).json
        stream = connect(port, "/v1/completions", {**body, "stream": True})
        first = stream.recv(65536)
        made.send_signal(signal.SIGTERM)
        rest = b""
        while part := stream.recv(65536):
            rest += part
        assert made.wait(PATIENCE) == 0
        with pytest.raises(ConnectionRefusedError):
            call(port, "/health")
    lines = (first + rest).decode().partition("\r\n\r\n")[2].split("\r\n")
    chunks = events("\n".join(line for line in lines if line.startswith("data: ")))
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["choices"][0]["text"]
    said = "".join(errors)
    for part in ("memory 1.00 GiB", "slots 4", "kernels", "torch on cpu", "ring of 8", "states, one every 64 tokens"):
        assert part in said
    assert said.rstrip().endswith("stopped")
    assert "Traceback" not in said


def test_it_says_how_it_drafts(saved):
    words = ("--spec", "ngram", "--spec-tokens", 3, "--no-spec-adaptive", *SMALL)
    with process(saved, "--port", 0, *words) as (made, errors):
        assert made.stdout.readline().startswith("ready: ")
        made.send_signal(signal.SIGTERM)
        assert made.wait(PATIENCE) == 0
    said = "".join(errors)
    assert "ring of 16, for windows of 4 tokens (3 drafts and the newest one); --ring-len takes another" in said
    assert "windows of drafts" in said
    assert "ngram, 3 drafts a step, verified by ring of 16" in said


def test_decode_without_a_ring_of_its_own_is_said():
    for state in ("snapshot", "fold"):
        with engine_of(spec="ngram", spec_state=state, mode="auto") as engine:
            assert decode_route(engine) == f"packed: windows of drafts by {state} leave no ring for other steps"
            assert engine.runner._route(4) == "packed"
    with engine_of(spec="ngram", ring_len=8) as engine:
        assert decode_route(engine) == "replay, ring of 8 (mode replay)"


def test_mistakes_end_it_before_it_serves(refused, saved, copy):
    assert "neither a folder nor a shipped model" in refused("serve", "/no/such/model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in refused("serve", saved, "--port", port)
    assert "cannot listen on no.such.host.invalid" in refused("serve", saved, "--host", "no.such.host.invalid")
    assert "does not run on cpu" in refused(
        "serve", saved, "--device", "cpu", "--linear-attn-decode-backend", "triton", "--port", 0
    )
    (copy / "model.safetensors").write_bytes(b"damaged")
    assert "truncated or damaged" in refused("serve", copy, "--port", 0)
    assert "does not hold weights" in refused("serve", saved, "--memory", "1KiB", "--port", 0)
    file = copy / "bad.jinja"
    file.write_bytes(b"\xff")
    assert "cannot be read" in refused("serve", saved, "--chat-template", file, "--port", 0)
