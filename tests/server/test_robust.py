"""Clients that leave, stall, flood or send nonsense: each gets what it deserves, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replayssm.errors import ModelFilesError
from replayssm.server.options import ServerOptions
from replayssm.server.run import Server
from tests.server.common import (
    PATIENCE,
    bytes_model,
    connect,
    events,
    iterate,
    request_bytes,
    said,
    serving,
    until,
)

LONG = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 3}
PATHS = ("/v1/completions", "/v1/chat/completions")


@contextlib.contextmanager
def slow_steps(running, seconds=0.02):
    """Every step takes so long at least, so that a test can act within a phase."""
    engine, step = running.engine, running.engine.step

    def slow():
        time.sleep(seconds)
        step()

    engine.step = slow
    try:
        yield
    finally:
        del engine.step


def drop(made: socket.socket) -> None:
    """Gone at once: a reset instead of a goodbye."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("leave", [drop, socket.socket.close], ids=["reset", "close"])
@pytest.mark.parametrize("phase", ["queue", "prompt", "decode", "forks"])
def test_who_leaves_gives_its_slot_back_at_once(phase, leave, stream):
    with serving(engine={"max_requests": 4, "chunk_tokens": 16}) as running, slow_steps(running):
        engine = running.engine
        others = []
        if phase == "queue":
            others = [connect(running.port, PATHS[0], LONG) for _ in range(4)]
            until(lambda: len(engine.scheduler.running) == 4)
        asked = {**LONG, "stream": stream}
        if phase == "prompt":
            asked["prompt"] = "x" * 240
        if phase == "forks":
            asked |= {"n": 3, "temperature": 1}
        before = len(others)
        mine = connect(running.port, PATHS[0], asked)
        service = running.server.service
        if phase == "queue":
            until(lambda: engine.scheduler.waiting)
        elif phase == "prompt":
            until(lambda: any(16 <= one.computed < 200 for one in engine.scheduler.running))
        else:
            wanted = 3 if phase == "forks" else 1
            until(lambda: sum(len(one.output) > 2 for one in list(engine.scheduler.running)) == wanted)
        steps = engine.steps
        leave(mine)
        until(lambda: service.desk.outputs == before)
        until(lambda: not engine.scheduler.waiting and len(engine.scheduler.running) == before)
        assert engine.steps - steps <= 5  # the news travels for a moment, then a step is under way
        assert engine.slots.used_slots == before
        for other in others:
            drop(other)
        running.wait_idle()
        assert engine.stats.finished["abort"] == (3 if phase == "forks" else 1) + before


def test_a_finished_request_leaves_nothing(server):
    for path in PATHS:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3} if "chat" in path else SHORT
            assert server.call(path, {**body, "stream": stream}).status == 200
    server.wait_idle()


def test_a_slow_reader_stalls_nobody():
    with serving() as running:
        running.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow = connect(running.port, PATHS[0], {**LONG, "stream": True, "logprobs": 20}, buffer=4096)
        engine = running.engine
        until(lambda: engine.scheduler.running)
        quick = running.call(PATHS[0], SHORT)
        assert quick.status == 200
        until(lambda: not engine.scheduler.running)  # its tokens are made, though it has read none
        assert running.call(PATHS[0], SHORT).json["choices"] == quick.json["choices"]
        text = b"".join(iterate_until_done(slow)).decode()
        slow.close()
        body = "".join(part for part in text.split("\r\n\r\n", 1)[1].split("\r\n") if part.startswith("data: "))
        chunks = events(body.replace("data: ", "\ndata: "))
        assert sum(len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks if c["choices"][0]["logprobs"]) == 250
        whole = running.call(PATHS[0], LONG).json["choices"][0]["text"]
        assert said(chunks) == whole
        running.wait_idle()


def iterate_until_done(made):
    for part in iterate(made):
        yield part
        if b"[DONE]" in part:
            return


def test_a_full_queue_refuses_and_recovers():
    with serving(engine={"max_requests": 1}, max_queue=1) as running, ThreadPoolExecutor(4) as pool:
        with slow_steps(running):
            first = [pool.submit(running.call, PATHS[0], {**LONG, "max_tokens": 40}) for _ in range(2)]
            until(lambda: running.server.service.desk.outputs == 2)
            for path in PATHS:
                body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else SHORT
                refused = running.call(path, body)
                assert refused.status == 429
                assert refused.error["code"] == "queue_full"
                assert refused.error["type"] == "rate_limit_error"
                assert 1 <= int(refused.headers["retry-after"]) <= 60
            never = running.call(PATHS[0], {**SHORT, "n": 3, "temperature": 1})
            assert (never.status, never.error["param"]) == (400, "n")
            assert [one.result().status for one in first] == [200, 200]
        assert running.call(PATHS[0], SHORT).status == 200
        running.wait_idle()


@pytest.mark.parametrize("path", PATHS)
def test_prompts_at_the_limit_of_the_context(server, path):
    turns = len("User: \n\nAssistant:")

    def ask(length):
        if "chat" in path:
            messages = [{"role": "user", "content": "x" * (length - turns)}]
            return server.call(path, {"messages": messages, "max_tokens": 1, "ignore_eos": True})
        return server.call(path, {"prompt": "x" * length, "max_tokens": 1, "ignore_eos": True})

    fits = ask(255)
    assert fits.status == 200
    assert fits.json["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 255, "completion_tokens": 1, "total_tokens": 256, "prompt_tokens_details": None,
    }  # fmt: skip
    assert fits.json["choices"][0]["finish_reason"] == "length"
    for length in (256, 257, 10_000, 1_000_000):
        refused = ask(length)
        assert refused.status == 400
        assert refused.error["code"] == "context_length_exceeded"
        assert refused.error["param"] == ("messages" if "chat" in path else "prompt")
    assert ask(100).status == 200


def test_more_tokens_than_pages_is_refused_not_queued_for_ever():
    with serving(engine={"memory": None, "max_requests": 1, "context": 256}) as running:
        pages = running.engine.pages
        pages.pages = 10  # 80 tokens
        refused = running.call(PATHS[0], {**LONG, "max_tokens": 200})
        assert (refused.status, refused.error["param"]) == (400, "max_tokens")
        chat = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 200}
        assert running.call(PATHS[1], chat).error["param"] == "max_completion_tokens"
        assert running.call(PATHS[1], {**chat, "max_completion_tokens": None, "stop": ["a"]}).status == 200
        pages.pages = 32
        running.wait_idle()


NONSENSE = [
    (b"", "no JSON body"),
    (b"{", "not JSON"),
    (b"nonsense", "not JSON"),
    (b'{"prompt": "x"', "not JSON"),
    (b"[]", "the body"),
    (b"null", ""),
    (b"1e999", ""),
    (b'"x"', "the body"),
    (b'{"prompt": "\xff\xfe"}', ""),
    (b"\xff\xfe\x00", ""),
    (b'{"prompt": "\\ud800"}', "prompt"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    (b'{"prompt": "x", "temperature": "1"}', "temperature"),
    (b'{"prompt": "x", "max_tokens": 1e3}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ""),
    (b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}", "seed"),
    (b'{"prompt": {"a": 1}}', "prompt"),
    (b'{"prompt": [["x"]]}', "prompt"),
    (b'{"prompt": ["x", 1]}', "prompt"),
    (b'{"prompt": [-1]}', "prompt"),
    (b'{"prompt": "x", "stop": [""]}', "stop"),
    (b'{"prompt": "x", "logit_bias": {"1": NaN}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"\xc2\xb2": 1}}', "logit_bias"),
    (b'{"prompt": "x", "response_format": {"type": "regex", "regex": "\\ud800"}}', "response_format"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    (b'{"prompt": "x", "x": {"' + b"a" * 10_000 + b'": 1}}', "x"),
]


@pytest.mark.parametrize(("body", "named"), NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused(server, body, named):
    reply = server.call(PATHS[0], body)
    assert reply.status == 400, reply
    assert named in reply.error["message"] or named == reply.error["param"]
    assert len(reply.error["message"]) < 2000
    for path in (PATHS[1], "/tokenize", "/detokenize"):
        assert server.call(path, body).status == 400


def test_other_mistakes_of_http(server):
    assert server.call("/nowhere").status == 404
    assert server.call("/nowhere").error["type"] == "not_found_error"
    assert server.call(PATHS[0]).status == 405
    assert server.call(PATHS[0]).error["message"]
    assert server.call("/v1/models", {}).status == 405
    assert server.call(PATHS[0], b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}).status == 400
    assert server.call(PATHS[0], SHORT, {"content-type": "text/plain"}).status == 400
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as made:
        made.sendall(b"\x00\xffnonsense\r\n\r\n")
        assert made.recv(1000).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as made:
        made.sendall(b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert made.recv(1000).startswith(b"HTTP/1.1 400")


def test_huge_bodies_are_not_read():
    with serving(max_body=10_000) as running:
        assert running.call(PATHS[0], {**SHORT, "user": "x" * 9_000}).status == 200
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as made:
            made.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
            assert made.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as made:
            made.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            part = b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"
            with contextlib.suppress(ConnectionError):
                for _ in range(20):
                    made.sendall(part)
            with contextlib.suppress(ConnectionError):
                assert made.recv(100).startswith(b"HTTP/1.1 413")
        running.wait_idle()


def test_a_body_that_never_comes_times_out():
    with serving(body_seconds=1) as running:
        whole = request_bytes(PATHS[0], SHORT)
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as made:
            made.sendall(whole[:-5])
            assert made.recv(100).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as made:
            made.sendall(whole[:-5])  # and who leaves meanwhile is forgotten
        running.wait_idle()


def test_the_key():
    with serving(api_key="schlüssel") as running:
        paths = ("/v1/models", "/metrics", "/stats", "/openapi.json", PATHS[0])
        for path in paths:
            body = SHORT if path == PATHS[0] else None
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": "x"}):
                refused = running.call(path, body, headers)
                assert refused.status == 401
                assert refused.error["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
            right = {"authorization": "Bearer schlüssel".encode().decode("latin-1")}
            assert running.call(path, body, right).status == 200
        assert running.call("/health").status == 200
        assert running.call("/").status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_exception_in_one_request_is_that_requests_alone(stream):
    with serving() as running, slow_steps(running), ThreadPoolExecutor(2) as pool:
        engine = running.engine
        good = pool.submit(running.call, PATHS[0], {**LONG, "max_tokens": 30})
        until(lambda: engine.scheduler.running)
        bad = pool.submit(running.call, PATHS[0], {**LONG, "max_tokens": 40, "stream": stream})
        until(lambda: len(engine.scheduler.running) == 2)

        def broken(*_, **__):
            raise ValueError("broken on purpose")

        next(one for one in engine.scheduler.running if one.limit == 41).stream.push = broken
        failed = bad.result()
        if stream:
            assert failed.status == 200
            error = events(failed.text)[-1]["error"]
        else:
            assert failed.status == 500
            error = failed.error
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert "broken on purpose" in error["message"]
        assert good.result().json["usage"]["completion_tokens"] == 30
        assert running.call(PATHS[0], SHORT).status == 200
        running.wait_idle()


def test_an_engine_that_dies_is_told_to_all():
    with serving() as running, ThreadPoolExecutor(3) as pool:
        with slow_steps(running):
            waiting = [pool.submit(running.call, PATHS[0], {**LONG, "stream": stream}) for stream in (False, True)]
            until(lambda: len(running.engine.scheduler.running) == 2)

            def dead():
                raise SystemError("out of order")

            running.engine.step = dead
            whole, streamed = (one.result() for one in waiting)
            running.engine.step = None
        assert (whole.status, whole.error["code"]) == (503, "engine_stopped")
        assert events(streamed.text)[-1]["error"]["code"] == "engine_stopped"
        assert running.call("/health").status == 503
        assert running.call(PATHS[0], SHORT).status == 503


def test_health_while_loading():
    go = threading.Event()

    def load():
        go.wait(PATIENCE)
        return bytes_model()

    with serving(load=load, ready=False) as running:
        assert (running.call("/health").status, running.call("/health").json) == (503, {"status": "loading"})
        for path, body in ((PATHS[0], SHORT), ("/v1/models", None), ("/tokenize", {"prompt": "x"})):
            refused = running.call(path, body)
            assert (refused.status, refused.error["code"]) == (503, "loading")
            assert "retry-after" in refused.headers
        assert b"replayssm_ready 0.0" in running.call("/metrics").text.encode()
        assert running.call("/stats").json["phase"] == "loading"
        go.set()
        until(lambda: running.call("/health").status == 200)
        assert running.call(PATHS[0], SHORT).status == 200
        running.wait_idle()


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load():
        raise ModelFilesError("the weights are damaged")

    server = Server(load, "x", ServerOptions(port=0))
    with pytest.raises(ModelFilesError, match="damaged"):
        server.run()


def test_stopping_while_loading_is_no_failure():
    go, begun, raised = threading.Event(), threading.Event(), []

    def load():
        begun.set()
        go.wait(PATIENCE)
        return bytes_model()

    server = Server(load, "x", ServerOptions(port=0))

    def run():
        try:
            server.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE)
    server.stop()
    time.sleep(0.5)
    go.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert raised == []
    assert server.service.phase == "stopped"


def test_stopping_lets_running_requests_end():
    with serving() as running, ThreadPoolExecutor(2) as pool:
        with slow_steps(running):
            going = [
                pool.submit(running.call, PATHS[0], {**LONG, "max_tokens": 40, "stream": s}) for s in (False, True)
            ]
            until(lambda: len(running.engine.scheduler.running) == 2)
            running.server.stop()
            whole, streamed = (one.result() for one in going)
        assert whole.json["usage"]["completion_tokens"] == 40
        assert said(events(streamed.text)) == whole.json["choices"][0]["text"]
        with pytest.raises(OSError):  # noqa: PT011
            running.call(PATHS[0], SHORT)


def test_stopping_waits_no_longer_than_it_should():
    with serving(drain_seconds=1) as running, ThreadPoolExecutor(2) as pool, slow_steps(running, 0.1):
        going = pool.submit(running.call, PATHS[0], LONG)
        until(lambda: running.engine.scheduler.running)
        start = time.monotonic()
        running.server.stop()
        with contextlib.suppress(Exception):
            assert going.result().status == 503
        assert time.monotonic() - start < 10


def test_the_answers_of_many_at_once_are_those_of_each_alone(gdn):
    def ask(i):
        prompt = f"{'It was the best of times. ' * (i % 5)}Chapter {i}"
        return gdn.call(PATHS[0], {"prompt": prompt, "max_tokens": 12, "seed": i, "temperature": i % 3 / 2})

    with ThreadPoolExecutor(16) as pool:
        together = [reply.json["choices"][0]["text"] for reply in pool.map(ask, range(24))]
    assert together[::5] == [ask(i).json["choices"][0]["text"] for i in range(0, 24, 5)]


def test_json_is_strict():
    with serving() as running:
        text = running.call(PATHS[0], {**SHORT, "logprobs": 2, "logit_bias": {"3": -100}}).text
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        running.wait_idle()
