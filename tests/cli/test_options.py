"""Bad options are refused before anything is loaded."""

import io
import sys

import pytest

from replayssm.cli import app
from replayssm.cli.options import SAMPLE_PROMPT, Sampling, read_prompt
from replayssm.cli.parser import build_parser


def parse(*words):
    return build_parser().parse_args(["generate", *words])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--ring-len", "0"], ["ring length 0", "1…64"]),
        (["--ring-len", "65"], ["ring length 65", "1…64"]),
        (["--ring-len", "-3"], ["ring length -3"]),
        (["--state-dtype", "fp8"], ["'fp8'", "--state-dtype", "float32", "bfloat16", "float16"]),
        (["--max-tokens", "0"], ["--max-tokens 0", "below 1"]),
        (["--max-tokens", "-5"], ["--max-tokens -5"]),
        (["--temperature", "-1"], ["--temperature -1.0"]),
        (["--temperature", "nan"], ["--temperature nan"]),
        (["--temperature", "inf"], ["--temperature inf"]),
        (["--temperature", "1e-42"], ["--temperature 1e-42", "0.001"]),
        (["--temperature", "1", "--seed", "4294967296"], ["--seed 4294967296", "4294967295"]),
        (["--top-k", "0"], ["--top-k 0"]),
        (["--top-p", "0"], ["--top-p 0.0"]),
        (["--top-p", "1.5"], ["--top-p 1.5"]),
        (["--temperature", "1", "--seed", "-1"], ["--seed -1"]),
        (["--greedy", "--temperature", "0.5"], ["--greedy", "--temperature 0.5"]),
        (["--greedy", "--top-k", "5", "--top-p", "0.5"], ["--greedy", "--top-k 5, --top-p 0.5"]),
        (["--temperature", "0", "--top-k", "5"], ["--temperature 0", "--top-k 5"]),
        (["--seed", "4"], ["--seed 4", "greedy"]),
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
    assert Sampling.from_args(parse()) == Sampling()
    assert Sampling.from_args(parse("--greedy")).greedy
    assert Sampling.from_args(parse("--temperature", "0")).greedy
    assert Sampling.from_args(parse("--top-k", "5")) == Sampling(1.0, 5, 1.0, 0)
    assert Sampling.from_args(parse("--temperature", "0.5", "--top-p", "0.9", "--seed", "7")) == Sampling(
        0.5, 0, 0.9, 7
    )
