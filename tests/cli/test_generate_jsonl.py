"""`replayssm generate --jsonl` on a random model of bytes: many prompts in, a line of JSON for each out."""

import io
import json
import re
import sys

import pytest

from replayssm.cli import many, prompt_lines
from replayssm.cli.generate_request import Line, read_lines
from replayssm.engine import runner
from replayssm.engine.params import SamplingParams
from replayssm.errors import OptionError, PromptError
from tests.cli.conftest import CONTEXT


@pytest.fixture
def answer(cli, saved, tmp_path):
    """Call with lines, objects or bytes; returns the result lines by number, and the whole result."""

    def call(lines, *words, code=0):
        raw = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        (tmp_path / "in.jsonl").write_bytes(raw)
        result = cli("generate", saved, "--jsonl", tmp_path / "in.jsonl", *words)
        assert result.code == code, result
        found = [json.loads(line) for line in result.out.splitlines()]
        assert [one["line"] for one in found] == sorted(one["line"] for one in found)
        return {one["line"]: one for one in found}, result

    return call


def single(cli, saved, prompt, *words):
    return cli("generate", saved, "--prompt", prompt, *words, "--json", "--quiet", "--no-check").json


def test_results_are_those_of_single_prompts(answer, cli, saved):
    words = ("--ring-len", 4, "--max-tokens", 6)
    prompts = ["hello", "a much longer prompt than the first"]
    found, result = answer([{"id": f"#{i}", "prompt": p} for i, p in enumerate(prompts)], *words)
    for i, prompt in enumerate(prompts):
        alone = single(cli, saved, prompt, *words)
        one = found[i + 1]
        assert one["id"] == f"#{i}"
        for key in ("text", "token_ids", "finish_reason", "prompt_tokens"):
            assert one[key] == alone[key]
        assert 0 < one["ttft"] < one["seconds"]
        assert one["cached_tokens"] == 0
    assert re.search(r"^2 prompts, 12 tokens in [\d.]+ s: [\d.]+ tokens/s$", result.err, re.M)
    assert "slots 32" in result.err
    assert "\x1b" not in result.err


BAD = {
    b"{not json": "no JSON",
    b"[" * 100_000: "no JSON",
    b'"hello"': 'no object, as in {"prompt": "Once"}, but "hello"',
    b'{"prompt": "caf\xe9"}': "not UTF-8: byte 15 is 0xe9",
    b'{"prompt": "\\ud800"}': "half a character",
    b'{"id": 1}': 'no "prompt"',
    b'{"prompt": null}': 'no "prompt"',
    b'{"prompt": ""}': "empty",
    b'{"prompt": []}': "empty",
    b'{"prompt": 5}': "prompt 5 is neither",
    b'{"prompt": [1, 2.5]}': "neither a text",
    b'{"prompt": [true]}': "neither a text",
    b'{"prompt": [1, 257]}': "257",
    b'{"prompt": [-1]}': "-1",
    b'{"prompt": "a", "temprature": 1}': "did you mean 'temperature'",
    b'{"prompt": "a", "max_new_tokens": 1}': "did you mean 'max_tokens'",
    b'{"prompt": "a", "text": "b"}': "'text' is a key of the results",
    b'{"prompt": "a", "temperature": "hot"}': "temperature 'hot'",
    b'{"prompt": "a", "temperature": NaN}': "temperature nan",
    b'{"prompt": "a", "top_p": 0}': "top_p 0",
    b'{"prompt": "a", "top_k": 1000}': "top_k 1000",
    b'{"prompt": "a", "seed": -1}': "seed -1",
    b'{"prompt": "a", "max_tokens": 1.5}': "max_tokens 1.5",
    b'{"prompt": "a", "max_tokens": true}': "max_tokens True",
    b'{"prompt": "a", "n": 2}': "greedy",
    b'{"prompt": "a", "ignore_eos": "yes"}': 'ignore_eos "yes"',
    b'{"prompt": "a", "stop": 5}': "stop 5",
    b'{"prompt": "a", "stop": [5]}': "stop [5]",
    b'{"prompt": "a", "stop": ""}': "empty",
    b'{"prompt": "a", "stop_token_ids": 5}': "stop_token_ids 5",
    b'{"prompt": "a", "stop_token_ids": [999]}': "999",
    b'{"prompt": "a", "logit_bias": [1]}': "logit_bias [1]",
    b'{"prompt": "a", "logit_bias": {"x": 1}}': "logit_bias",
    json.dumps({"prompt": "a" * CONTEXT}).encode(): f"{CONTEXT} tokens",
}


def test_bad_lines_stop_no_other(answer):
    good = b'{"prompt": "hello"}'
    lines = [line for bad in BAD for line in (bad, b"  ", good)]
    found, result = answer(lines, "--max-tokens", 2, code=1)
    assert len(found) == 2 * len(BAD)
    for i, (bad, message) in enumerate(BAD.items()):
        assert message in found[3 * i + 1]["error"], bad
        assert "text" not in found[3 * i + 1]
        assert found[3 * i + 3]["text"] == found[3]["text"]
    assert f"{2 * len(BAD)} prompts, {len(BAD)} of them failed" in result.err


def test_other_keys_come_back(answer):
    kept = {"id": None, "user": {"name": ["é", 1.5]}, "tokens": 3}
    found, _ = answer([{"prompt": "a", **kept}, {"prompt": "", **kept}], "--max-tokens", 1, code=1)
    for one in found.values():
        assert {key: one[key] for key in kept} == kept
    assert "error" in found[2]


def test_a_line_has_the_last_word(answer, cli, saved):
    lines = [
        {"prompt": "hello"},
        {"prompt": "hello", "seed": 4, "max_tokens": 3},
        {"prompt": "hello", "temperature": 0},
        {"prompt": "hello", "temperature": None, "stop": None, "seed": 7},
        {"prompt": "hello", "temperature": 0, "top_p": 0.1, "seed": 1},
    ]
    found, _ = answer(lines, "--temperature", 1.5, "--seed", 7, "--max-tokens", 6, "--quiet")
    alone = single(cli, saved, "hello", "--temperature", 1.5, "--max-tokens", 6, "--seed", 7)
    assert found[1]["token_ids"] == found[4]["token_ids"] == alone["token_ids"]
    assert len(found[2]["token_ids"]) == 3
    assert found[2]["token_ids"] != found[1]["token_ids"][:3]
    assert found[3]["token_ids"] == found[5]["token_ids"] != found[1]["token_ids"]


def test_a_filter_alone_samples():
    def params(found, **defaults):
        return prompt_lines.asked_of({"prompt": "a", **found}, defaults, 2).params

    assert params({}) == SamplingParams(temperature=0, seed=2)
    assert params({"top_p": 0.5}) == SamplingParams(top_p=0.5, seed=2)
    assert params({}, top_p=0.5, seed=2**63 - 1) == SamplingParams(top_p=0.5, seed=1)
    assert params({"top_p": 0.5}, temperature=0.0).greedy
    assert params({"logit_bias": {"3": -1}}).logit_bias == {3: -1}


def test_several_outputs(answer):
    lines = [{"prompt": "hello", "n": 3, "id": 1}, {"prompt": "hello"}]
    found, result = answer(lines, "--temperature", 1.5, "--max-tokens", 5)
    outputs = found[1]["outputs"]
    assert len(outputs) == 3
    assert len({tuple(one["token_ids"]) for one in outputs}) == 3
    assert found[1]["id"] == 1
    assert "text" not in found[1]
    assert "2 prompts, 20 tokens" in result.err
    one_of_each, _ = answer([{"prompt": "hello"}], "--temperature", 1.5, "--max-tokens", 5)
    assert one_of_each[1]["token_ids"] == outputs[0]["token_ids"]


def test_stop_ends_and_logprobs(answer):
    free, _ = answer([{"prompt": "hello"}], "--max-tokens", 10)
    text, tokens = free[1]["text"], free[1]["token_ids"]
    lines = [
        {"prompt": "hello", "stop": text[3:5]},
        {"prompt": "hello", "stop_token_ids": [tokens[2]], "logprobs": 1},
        {"prompt": "hello", "max_tokens": 2},
    ]
    found, _ = answer(lines, "--max-tokens", 10)
    assert found[1]["text"] == text[: text.index(text[3:5])]
    assert found[1]["finish_reason"] == found[2]["finish_reason"] == "stop"
    assert found[2]["token_ids"] == tokens[: tokens.index(tokens[2]) + 1]
    assert [one["token"] for one in found[2]["logprobs"]] == found[2]["token_ids"]
    assert found[3]["finish_reason"] == "length"
    assert "logprobs" not in found[3]


def test_token_ids_as_prompt(answer):
    found, _ = answer([{"prompt": "hi"}, {"prompt": None}, {"prompt": [71, 72]}], "--max-tokens", 2, code=1)
    assert found[3]["prompt_tokens"] == found[1]["prompt_tokens"] == 2


def test_standard_input_and_a_file_of_results(cli, saved, tmp_path, monkeypatch):
    raw = "\ufeff".encode() + b'{"prompt": "a", "id": "\\ud800"}\r\n{"prompt": "b"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    result = cli("generate", saved, "--jsonl", "-", "--out", tmp_path / "out", "--max-tokens", 2, "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")
    found = [json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()]
    assert [one["line"] for one in found] == [1, 2]
    assert found[0]["id"] == "\ud800"


def test_nothing_to_do(refused, tmp_path, monkeypatch):
    (tmp_path / "empty").write_text("\n \n")
    assert "has no prompts" in refused("generate", "--jsonl", tmp_path / "empty")
    monkeypatch.setattr(sys, "stdin", None)
    assert "closed" in refused("generate", "--jsonl", "-")


def test_blank_lines_count(tmp_path):
    (tmp_path / "f").write_bytes(b"\n1\n \r\n2")
    assert read_lines(str(tmp_path / "f")) == [Line(2, b"1"), Line(4, b"2")]


def test_few_slots_and_a_shared_beginning(answer):
    prompts = [{"prompt": "the same beginning of eighty characters " * 4 + str(i)} for i in range(5)]
    words = ("--max-tokens", 4, "--max-requests", 2, "--chunk-tokens", 40, "--no-replay")
    plain, result = answer(prompts, *words)
    assert "slots 2" in result.err
    cached, _ = answer(prompts, *words, "--prefix-cache")
    assert [one["token_ids"] for one in cached.values()] == [one["token_ids"] for one in plain.values()]
    assert cached[5]["cached_tokens"] > 0


def test_a_failure_in_the_engine_is_the_lines_own(answer, monkeypatch):
    original = runner.Runner._prefill

    def failing(self, chunks):
        if any(len(chunk.request.prompt) == 3 for chunk in chunks):
            raise ZeroDivisionError("three")
        return original(self, chunks)

    monkeypatch.setattr(runner.Runner, "_prefill", failing)
    lines = [{"prompt": "ab"}, {"prompt": "abc", "id": 9}, {"prompt": "ab"}]
    found, result = answer(lines, "--max-tokens", 2, "--max-requests", 1, code=1)
    assert "three" in found[2]["error"]
    assert (found[2]["finish_reason"], found[2]["id"]) == ("error", 9)
    assert found[3]["text"] == found[1]["text"]
    assert "1 of them failed" in result.err


def test_results_are_written_in_order_as_soon_as_they_can():
    out = io.StringIO()
    results = many.Results(out, lambda: None)
    results.add(1, {"line": 2})
    assert out.getvalue() == ""
    results.add(0, {"line": 1, "error": "x"})
    assert [json.loads(line)["line"] for line in out.getvalue().splitlines()] == [1, 2]
    results.add(2, {"line": 3, "x": float("nan")}, tokens=4)
    assert out.getvalue().splitlines()[2] == '{"line": 3, "x": null}'
    assert (results.failed, results.tokens) == (1, 4)


def test_wrong_objects_name_themselves():
    with pytest.raises(PromptError, match="but \\[1"):
        prompt_lines.read_object(Line(1, json.dumps([1] * 99).encode()))
    with pytest.raises(OptionError, match="did you mean 'stop'"):
        prompt_lines.asked_of({"prompt": "a", "stops": "b"}, {}, 0)
