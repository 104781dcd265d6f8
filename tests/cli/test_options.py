"""Bad options are refused before anything is loaded."""

import io
import sys

import pytest

from replayssm.cli import app
from replayssm.cli.generate_request import GenerateRequest
from replayssm.cli.options import SAMPLE_PROMPT, read_prompt
from replayssm.cli.parser import build_parser
from replayssm.engine.params import SamplingParams


def parse(*words):
    return build_parser().parse_args(["generate", *words])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--ring-len", "0"], ["ring length 0", "1…64"]),
        (["--ring-len", "65"], ["ring length 65", "1…64"]),
        (["--ring-len", "-3"], ["ring length -3"]),
        (["--state-dtype", "fp8"], ["'fp8'", "--state-dtype", "float32", "bfloat16", "float16"]),
        (["--max-tokens", "0"], ["--max-tokens 0", "outside 1…"]),
        (["--max-tokens", "-5"], ["--max-tokens -5"]),
        (["--temperature", "-1"], ["--temperature -1.0"]),
        (["--temperature", "nan"], ["--temperature nan"]),
        (["--temperature", "inf"], ["--temperature inf"]),
        (["--temperature", "1", "--seed", str(2**63)], [f"--seed {2**63}", f"{2**63 - 1}"]),
        (["--top-k", "0"], ["--top-k 0"]),
        (["--top-p", "0"], ["--top-p 0.0"]),
        (["--top-p", "1.5"], ["--top-p 1.5"]),
        (["--temperature", "1", "--seed", "-1"], ["--seed -1"]),
        (["--greedy", "--temperature", "0.5"], ["--greedy", "--temperature 0.5"]),
        (["--greedy", "--top-k", "5", "--top-p", "0.5"], ["--greedy", "--top-k 5, --top-p 0.5"]),
        (["--temperature", "0", "--top-k", "5"], ["--temperature 0", "--top-k 5"]),
        (["--seed", "4"], ["--seed 4", "greedy"]),
        (["--min-p", "2"], ["--min-p 2.0"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty 0.0"]),
        (["--presence-penalty", "3"], ["--presence-penalty 3.0", "2]"]),
        (["--frequency-penalty", "nan"], ["--frequency-penalty nan"]),
        (["--stop", ""], ["--stop", "empty"]),
        (["--logprobs", "21", "--json"], ["--logprobs 21", "20"]),
        (["--logprobs", "1"], ["--logprobs 1", "--json"]),
        (["--temperature", "1", "--n", "2"], ["--n 2", "--jsonl"]),
        (["--max-requests", "2"], ["--max-requests 2", "--jsonl"]),
        (["--out", "x"], ["--out x", "--jsonl"]),
        (["--prefix-cache"], ["--prefix-cache", "--jsonl"]),
        (["--memory", "8"], ["--memory '8'", "unit"]),
        (["--chunk-tokens", "1"], ["--chunk-tokens 1", "2"]),
        (["--context", "1"], ["--context 1"]),
        (["--jsonl", "none.jsonl"], ["none.jsonl", "No such file"]),
        (["--jsonl", __file__, "--json"], ["--json", "--jsonl"]),
        (["--jsonl", __file__, "--prompt", "a"], ["--jsonl", "--prompt"]),
        (["--jsonl", __file__, "--n", "2"], ["--n = 2 greedy"]),
        (["--jsonl", __file__, "--max-requests", "0"], ["--max-requests 0"]),
        (["--jsonl", __file__, "--out", "/no/such/folder"], ["--out", "/no/such"]),
        (["--prompt", ""], ["--prompt", "empty"]),
        (["--prompt", " \n\t"], ["--prompt", "empty"]),
        (["--prompt", "caf\udce9"], ["--prompt", "not UTF-8 at character 3"]),
        (["--prompt", "a", "--prompt-file", "b"], ["--prompt-file", "--prompt"]),
    ],
)
def test_refused(refused, monkeypatch, words, parts):
    monkeypatch.setattr(app, "import_module", lambda name: pytest.fail("imported " + name))
    line = refused("generate", *words)
    for part in parts:
        assert part in line


def test_prompt_files(refused, tmp_path, monkeypatch):
    assert "No such file" in refused("generate", "--prompt-file", tmp_path / "none")
    assert "directory" in refused("generate", "--prompt-file", tmp_path)
    (tmp_path / "empty").write_text("\n\n")
    assert "empty" in refused("generate", "--prompt-file", tmp_path / "empty")
    (tmp_path / "latin1").write_bytes("caf\xe9".encode("latin-1"))
    line = refused("generate", "--prompt-file", tmp_path / "latin1")
    assert "not UTF-8: byte 3 is 0xe9" in line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "standard input is empty" in refused("generate", "--prompt-file", "-")


def test_prompt_sources(tmp_path, monkeypatch):
    assert read_prompt(parse()) == SAMPLE_PROMPT
    assert read_prompt(parse("--prompt", "so ")) == "so "
    (tmp_path / "p").write_bytes("één\r\ntwee\n".encode())
    assert read_prompt(parse("--prompt-file", str(tmp_path / "p"))) == "één\ntwee"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("日本\n\n".encode())))
    assert read_prompt(parse("--prompt-file", "-")) == "日本\n"


def test_sampling():
    def params(*words):
        return GenerateRequest.from_args(parse(*words, "--max-tokens", "9")).params

    greedy = SamplingParams(temperature=0, seed=0, max_tokens=9)
    assert params() == params("--greedy") == params("--temperature", "0") == greedy
    assert params("--top-k", "5") == SamplingParams(top_k=5, seed=0, max_tokens=9)
    assert params("--min-p", "0.5") == SamplingParams(min_p=0.5, seed=0, max_tokens=9)
    assert params("--repetition-penalty", "1.5", "--stop", "a", "--stop", "b", "--ignore-eos") == SamplingParams(
        temperature=0, repetition_penalty=1.5, stop=("a", "b"), ignore_eos=True, seed=0, max_tokens=9
    )
    assert params("--temperature", "0.5", "--top-p", "0.9", "--seed", "7") == SamplingParams(
        temperature=0.5, top_p=0.9, seed=7, max_tokens=9
    )
