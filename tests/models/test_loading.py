"""Loading local folders as the hub lays them out, and refusing those that cannot be served."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import replayssm
from replayssm.errors import (
    DtypeError,
    ModelFilesError,
    ModelNotFoundError,
    ReplayError,
    ShapeError,
    UnsupportedModelError,
)
from replayssm.models.loading import load_model
from tests.models.tiny import FAMILIES, VOCAB, model_of, prompt


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {chr(0x4E00 + i): i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=chr(0x4E00)))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def save(family, folder, tokenizer, **kwargs):
    model_of(family).save_pretrained(folder, **kwargs)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, tokenizer):
    return save("qwen3_5_text", tmp_path / "model", tokenizer)


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))


def drop_tensor(folder, part):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if part in name)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    return name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, sharded, tmp_path, tokenizer):
    save(family, tmp_path, tokenizer, **({"max_shard_size": "200KB"} if sharded else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    loaded = load_model(tmp_path)
    assert len(loaded.specs) == 3
    ids = prompt(1, 7)
    args = dict(max_new_tokens=20, do_sample=False)
    stock = model_of(family).generate(ids, **args)
    assert torch.equal(loaded.model.generate(ids, **args), stock)
    with replayssm.enable(loaded.model, ring_len=4) as enabled:
        assert torch.equal(loaded.model.generate(ids, **args), stock)
    assert enabled.specs == loaded.specs


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_gate_parameters_stay_in_fp32(family, tmp_path, tokenizer):
    model = load_model(save(family, tmp_path, tokenizer), dtype="bfloat16").model
    kept = {name: p for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    stock = dict(model_of(family).named_parameters())
    assert len(kept) == 6
    for name, parameter in kept.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stock[name])
    assert next(p for n, p in model.named_parameters() if "q" in n and p.ndim == 2).dtype == torch.bfloat16
    with replayssm.enable(model):
        model.generate(prompt(2, 5), max_new_tokens=20)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert next(p for n, p in again.named_parameters() if n.endswith("A_log")).dtype == torch.bfloat16 or (
        family in ("bailing_hybrid", "glm5_next")
    )


def test_unknown_name_suggests_a_shipped_model():
    with pytest.raises(ModelNotFoundError, match="did you mean 'gdn'"):
        load_model("gdnn")


def test_missing_files(folder):
    for name, what in (
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "weights"),
        ("config.json", "config.json"),
    ):
        (folder / name).unlink()
        with pytest.raises(ModelNotFoundError, match=what):
            load_model(folder)


def test_missing_shard(tmp_path, tokenizer):
    save("qwen3_5_text", tmp_path, tokenizer, max_shard_size="200KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFoundError, match=shard.name):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(ModelFilesError, match="truncated or damaged"):
        load_model(folder)


def test_missing_and_mismatched_tensors_are_named(folder):
    name = drop_tensor(folder, "A_log")
    with pytest.raises(ModelFilesError, match=r"A_log is missing"):
        load_model(folder)
    assert name.endswith("A_log")
    shutil.copy(folder / "model.safetensors", folder / "keep")
    edit_config(folder, intermediate_size=96)
    with pytest.raises(ModelFilesError, match=r"is \[.*64.*\], the config asks for \[.*96"):
        load_model(folder)


def test_missing_head_of_an_untied_model(folder):
    drop_tensor(folder, "lm_head")
    with pytest.raises(ModelFilesError, match="lm_head"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\x00"])
def test_damaged_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match="not a JSON object"):
        load_model(folder)


def test_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="tokenizer"):
        load_model(folder)


@pytest.mark.parametrize("model_type", ["llama", None, "nemotron_h"])
def test_unknown_model_type(folder, model_type):
    edit_config(folder, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match="qwen3_5_text"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"linear_key_head_dim": 257}, "257"),
        ({"linear_value_head_dim": 320}, "320"),
        ({"linear_num_key_heads": 4}, "4 key heads do not divide 6"),
    ],
)
def test_unservable_geometry(folder, changes, numbers):
    edit_config(folder, **changes)
    with pytest.raises(ShapeError, match=numbers):
        load_model(folder)


def test_config_without_linear_layers(folder):
    edit_config(folder, layer_types=["full_attention"] * 4)
    with pytest.raises(ModelFilesError, match="none of them linear_attention"):
        load_model(folder)


def test_dtype_is_checked(folder):
    with pytest.raises(DtypeError, match="int8"):
        load_model(folder, dtype="int8")


def test_every_refusal_is_a_replay_error():
    for kind in (DtypeError, ModelFilesError, ModelNotFoundError, ShapeError, UnsupportedModelError):
        assert issubclass(kind, ReplayError)
        assert kind.exit_code == 2
