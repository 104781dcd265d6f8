"""A random model of bytes, saved as a folder, and a way to call the command in this process."""

from __future__ import annotations

import json
import shutil
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from replayssm.cli import main
from tests.models.tiny import config_of

EOS = 256
CONTEXT = 512  # max_position_embeddings of the tiny configs


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens and an end token."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE({**vocab, "<end>": EOS}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def save_model(folder, family="qwen3_5_text", **changes):
    torch.manual_seed(5)
    config = config_of(family, vocab_size=EOS + 1, eos_token_id=EOS, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5 if "conv1d" in name else 1.2 / parameter.shape[-1] ** 0.5)
            elif "A_log" in name:
                parameter.uniform_(-3, 0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The model's folder, for reading only."""
    return save_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A config.json of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("config")
    config_of("qwen3_5_text").save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the model's folder that a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def cli(capsys):
    def call(*words: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(cli):
    """Call, expect exit code 2 and one line on stderr; returns it."""

    def call(*words: object) -> str:
        result = cli(*words)
        assert result.code == 2, result
        errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, result
        assert result.err.splitlines()[-1] == errors[0]
        assert "Traceback" not in result.err
        return errors[0]

    return call
