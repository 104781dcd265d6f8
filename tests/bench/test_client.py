"""The load client: what it times and counts, what it takes for a failure, what it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from replayssm.bench.client import Outcome, row_of
from replayssm.bench.client_data import read_dataset, synthetic
from replayssm.bench.client_request import Load
from replayssm.cli import main
from replayssm.cli.parser import build_parser
from replayssm.errors import OptionError, ReplayError


def parsed(*words):
    args = build_parser().parse_args(["bench", "serve", *map(str, words)])
    return args.request(args)


class Fake:
    """A server that does to every stream what `script(number)` says: parts to send, seconds to wait, or None to hang
    up."""

    def __init__(self, script, status=200):
        self.script, self.status, self.bodies, self.most, self.now = script, status, [], 0, 0
        self.loop = asyncio.new_event_loop()
        started = threading.Event()

        async def serve():
            self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
            started.set()

        def run():
            self.loop.create_task(serve())
            self.loop.run_forever()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        started.wait(10)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            body = b'{"data": [{"id": "fake"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            writer.close()
            return
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.now += 1
        self.most = max(self.most, self.now)
        writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % self.status)
        for part in self.script(len(self.bodies)):
            if part is None:
                break
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                raw = part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n"
                writer.write(b"%x\r\n" % len(raw) + raw + b"\r\n")
                await writer.drain()
        else:
            writer.write(b"0\r\n\r\n")
        self.now -= 1
        writer.close()

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def text(word, reason=None):
    return {"choices": [{"index": 0, "text": word, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
GOOD = [0.03, text("a"), 0.02, text("b"), 0.02, text("c", "length"), USAGE, b"data: [DONE]\n\n"]


@pytest.fixture
def fake():
    made = []

    def start(script, status=200):
        made.append(Fake(script, status))
        return made[-1]

    yield start
    for one in made:
        one.close()


def bench(url, tmp_path, *words):
    file = tmp_path / "out.json"
    code = main(["bench", "serve", "--url", url, "--json", str(file), *map(str, words)])
    return code, json.loads(file.read_text())


def test_times_and_counts(fake, tmp_path, capsys):
    server = fake(lambda _: GOOD)
    code, found = bench(server.url, tmp_path, "--concurrency", "1,3", "--requests", 6, "--warm-up", 1, "--ignore-eos")
    assert code == 0
    assert found["model"] == "fake"
    assert len(server.bodies) == 2 * 7
    assert server.most == 3
    assert len({body["prompt"] for body in server.bodies}) == 14, "a prompt came twice"
    assert all(body["ignore_eos"] and body["stream"] and body["max_tokens"] == 128 for body in server.bodies)
    for row in found["rows"]:
        assert (row["requests"], row["completed"], row["failures"]) == (6, 6, {})
        assert (row["prompt_tokens"], row["output_tokens"], row["counted"]) == (42, 30, "usage")
        assert 30 <= row["ttft_ms"]["median"] < 300
        assert 20 <= row["itl_ms"]["median"] < 200
        assert row["tpot_ms"]["median"] == pytest.approx(2 * row["itl_ms"]["mean"] / 4, rel=0.5)
        assert row["e2el_ms"]["median"] >= 70
        assert row["output_tokens_per_s"] == pytest.approx(30 / row["seconds"])
    assert found["rows"][1]["seconds"] < found["rows"][0]["seconds"]
    assert "concurrency" in capsys.readouterr().out


def test_arrivals_at_a_rate(fake, tmp_path):
    server = fake(lambda _: GOOD)
    start = time.perf_counter()
    _, found = bench(server.url, tmp_path, "--rate", "20,inf", "--requests", 10, "--warm-up", 0, "--endpoint", "chat")
    assert [row["load"] for row in found["rows"]] == [20, None]
    assert found["rows"][0]["seconds"] > 0.15
    assert time.perf_counter() - start < 20
    assert server.most == 10
    assert server.bodies[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("script", "status", "why"),
    [
        ([text("a"), None], 200, "connection closed|broken HTTP"),
        ([text("a"), b"data: [DONE]\n\n"], 200, "without a finish reason"),
        ([text("a"), {"error": {"message": "x"}}], 200, "error in the stream"),
        ([b"data: {nonsense\n\n"], 200, "not OpenAI's"),
        ([{"choices": [1]}], 200, "not OpenAI's"),
        ([b'{"error": {}}'], 503, "HTTP 503"),
        ([text("a"), 5.0], 200, "timeout"),
    ],
)
def test_failures_are_counted_by_reason(fake, tmp_path, capsys, script, status, why):
    server = fake(lambda number: script if number % 2 or status != 200 else GOOD, status)
    code, found = bench(
        server.url, tmp_path, "--concurrency", 1, "--requests", 4, "--warm-up", 0, "--timeout", 0.4, "--model", "m"
    )
    (row,) = found["rows"]
    assert code == 1
    assert not found["ok"]
    assert sum(row["failures"].values()) == (2 if status == 200 else 4)
    assert row["completed"] == 4 - sum(row["failures"].values())
    (name,) = row["failures"]
    assert pytest.importorskip("re").search(why, name)
    assert "FAILED concurrency 1" in capsys.readouterr().out
    if row["completed"]:
        assert row["output_tokens"] == 10, "what failed was counted"


def test_chunks_are_counted_where_there_is_no_usage(fake, tmp_path, capsys):
    server = fake(lambda _: [one for one in GOOD if one is not USAGE])
    _, found = bench(server.url, tmp_path, "--concurrency", 2, "--requests", 4)
    assert (found["rows"][0]["counted"], found["rows"][0]["output_tokens"]) == ("chunks", 12)
    assert found["rows"][0]["prompt_tokens"] is None
    assert "counted as chunks" in capsys.readouterr().out


def test_a_row_by_hand():
    good = Outcome(start=1.0, end=3.0, times=[1.5, 2.0, 2.9], tokens=8, prompt_tokens=4)
    one = Outcome(start=1.5, end=2.0, times=[1.7], tokens=1, prompt_tokens=2)
    bad = Outcome(start=2.0, end=5.0, times=[2.1], failure="timeout")
    row = row_of(Load("concurrency", 2), [good, one, bad])
    assert row["seconds"] == 4.0
    assert (row["output_tokens"], row["prompt_tokens"]) == (9, 6)
    assert row["ttft_ms"]["mean"] == pytest.approx(350)
    assert row["tpot_ms"]["mean"] == pytest.approx(200)
    assert row["itl_ms"]["mean"] == pytest.approx(700)
    assert row["e2el_ms"]["mean"] == pytest.approx(1250)
    nothing = row_of(Load("rate", 1), [bad])
    assert nothing["ttft_ms"] is None
    assert nothing["output_tokens_per_s"] == 0


def test_no_server(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "1", "--rate", "1"], "give one"),
        (["--concurrency", "0"], "--concurrency '0'"),
        (["--concurrency", "1.5"], "--concurrency '1.5' is no whole number"),
        (["--rate", "-1"], "--rate '-1'"),
        (["--rate", "nan"], "--rate 'nan'"),
        (["--url", "ftp://x"], "--url 'ftp://x'"),
        (["--url", "http://x:99999"], "--url"),
        (["--requests", "0"], "--requests 0 is below 1"),
        (["--temperature", "3"], "--temperature 3.0 is outside"),
        (["--timeout", "0"], "--timeout 0.0"),
        (["--dataset", "/no/such"], "/no/such cannot be read"),
        (["--plot", "x.txt"], "must end with one of"),
        (["--json", "/no/such/x"], "there is no folder"),
    ],
)
def test_refusals(words, said):
    with pytest.raises(ReplayError, match=said):
        parsed(*words)


def test_addresses():
    for url, expected in (
        ("http://h", ("h", 80, False, "")),
        ("https://h/v1/", ("h", 443, True, "")),
        ("http://[::1]:7/llm/v1", ("::1", 7, False, "/llm")),
    ):
        found = parsed("--url", url)
        assert (found.host, found.port, found.tls, found.base) == expected


def test_datasets(tmp_path):
    file = tmp_path / "data"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    found = read_dataset(file, 5, 9, 0)
    assert len(found) == 5
    assert {(one.text, one.max_tokens) for one in found} == {("a", 3), ("b", 9)}
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    assert [one.text for one in read_dataset(file, 1, 9, 0)] == ["hello"]
    for text, said in (
        ("[]", "has no prompts"),
        ("nonsense", "neither JSON nor"),
        ('{"prompt": ""}', "entry 1"),
        ('{"prompt": "a", "max_tokens": 0}', "entry 1"),
        ("[1]", "entry 1"),
    ):
        file.write_text(text)
        with pytest.raises(OptionError, match=said):
            read_dataset(file, 1, 9, 0)
    file.write_bytes(b"\xff")
    with pytest.raises(OptionError, match="not UTF-8"):
        read_dataset(file, 1, 9, 0)


def test_random_prompts_are_a_function_of_the_seed():
    assert synthetic(3, 5, 9, 1) == synthetic(3, 5, 9, 1) != synthetic(3, 5, 9, 2)
    assert all(len(one.text.split()) == 5 for one in synthetic(3, 5, 9, 1))


def test_the_key_is_not_in_the_command(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "env")
    assert parsed().key == "env"
    found = parsed("--api-key", "hidden", "--ignore-eos")
    assert found.key == "hidden"
    assert "hidden" not in found.command
    assert found.command.endswith("--ignore-eos")
