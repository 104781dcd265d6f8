"""Text through HTTP: characters whole, stop texts never in part."""

from __future__ import annotations

import codecs

import pytest

from tests.server.common import connect, events, exactly, iterate, said

CHAT = [{"role": "user", "content": "x"}]


def stream(server, path="/v1/completions", **body):
    prompt = {"messages": CHAT} if "chat" in path else {"prompt": "x"}
    reply = server.call(path, {**prompt, "max_tokens": 60, "stream": True, **body})
    assert reply.status == 200, reply.text
    return events(reply.text)


def reason(chunks):
    return next(r for chunk in chunks for c in chunk["choices"] if (r := c["finish_reason"]))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("text", ["a🙂b", "ďéč", "日本語🇨🇭", "e\u0301 👩‍👩‍👧"])
def test_characters_of_several_tokens_are_whole_in_every_chunk(server, path, text):
    chunks = stream(server, path, response_format=exactly(text))
    assert said(chunks) == text
    assert not any("\ufffd" in said([chunk]) for chunk in chunks)
    assert reason(chunks) == "stop"


def test_bytes_of_the_stream_are_utf8_after_every_read(server):
    socket = connect(server.port, "/v1/completions", {
        "prompt": "x", "max_tokens": 60, "stream": True, "response_format": exactly("🙂" * 12),
    })  # fmt: skip
    decoder, head, body = codecs.getincrementaldecoder("utf-8")(), b"", ""
    for part in iterate(socket):
        if b"\r\n\r\n" not in head:
            head += part
            continue
        body += decoder.decode(part)
        assert decoder.getstate()[0] == b"", "a chunk ends within a character"
        if "[DONE]" in body:
            break
    socket.close()
    assert "\ufffd" not in body


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_by_the_length_is_marked_once(server, cut):
    chunks = stream(server, response_format=exactly("ab🙂"), max_tokens=2 + cut)
    assert said(chunks) == "ab\ufffd"
    assert [said([chunk]) for chunk in chunks if "\ufffd" in said([chunk])] == ["\ufffd"]
    assert reason(chunks) == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "why"),
    [
        ("ABCDEFGHIJ", ["DEFGHIJ"], "ABC", "stop"),
        ("alpha beta gamma", ["beta gamma"], "alpha ", "stop"),
        ("alpha beta gamm", ["beta gamma"], "alpha beta gamm", "stop"),  # its tail is not lost when the text ends
        ("one two three", ["two three", "two"], "one ", "stop"),
        ("one two three", ["two", "two three"], "one ", "stop"),
        ("aab", ["ab"], "a", "stop"),
        ("x🙂y", ["🙂"], "x", "stop"),
        ("DEF", ["DEF"], "", "stop"),
    ],
)
def test_stop_texts(server, path, text, stop, expected, why):
    chunks = stream(server, path, response_format=exactly(text), stop=stop)
    assert said(chunks) == expected
    assert reason(chunks) == why
    so_far = ""
    for chunk in chunks:
        so_far += said([chunk])
        assert expected.startswith(so_far), "part of a stop text was sent"


def test_usage_counts_the_tokens_of_a_stop_text(server):
    asked = dict(response_format=exactly("ABCDEFGH"), stop=["DEF"])
    chunks = stream(server, stream_options={"include_usage": True}, **asked)
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    whole = server.call("/v1/completions", {"prompt": "x", "max_tokens": 60, **asked}).json
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["choices"][0]["text"] == "ABC"


def test_tokenize_and_back(server, gdn):
    for running in (server, gdn):
        for text in ("Hello, world", "ďéč 🙂", "", " "):
            tokens = running.call("/tokenize", {"prompt": text})
            assert tokens.status == 200
            assert tokens.json["count"] == len(tokens.json["tokens"])
            assert running.call("/detokenize", {"tokens": tokens.json["tokens"]}).json == {"prompt": text}
    long = "It is a truth. " * 700
    assert gdn.call("/tokenize", {"prompt": long}).status == 400
    assert server.call("/tokenize", {}).error["param"] == "prompt"
    assert server.call("/detokenize", {"tokens": [257]}).error["param"] == "tokens"
