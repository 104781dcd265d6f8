"""Models with random weights."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replayssm.bench import serving_configs, serving_model
from replayssm.cli.parser import build_parser
from replayssm.errors import ModelFilesError, OptionError, UnsupportedModelError
from replayssm.models.families import layer_specs
from replayssm.planner.checkpoints import GEOMETRIES
from tests.models.tiny import config_of, model_of, prompt

CPU = torch.device("cpu")


def request_of(*words):
    args: argparse.Namespace = build_parser().parse_args(["bench", "throughput", *map(str, words)])
    return args.request(args)


@pytest.mark.parametrize("name", serving_configs.CONFIGS)
def test_dimensions_are_those_of_the_planner(name):
    config = AutoConfig.for_model(**serving_configs.CONFIGS[name])
    known, specs = GEOMETRIES[name], layer_specs(config)
    assert (set(specs), len(specs), config.num_hidden_layers) == ({known.spec}, known.linear_layers, known.all_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = sum(x.numel() for x in model.parameters())
    if name == "Kimi-Linear-48B-A3B":  # the planner counted transformers' default of 6 attention layers
        layers = [sum(x.numel() for x in model.model.layers[i].self_attn.parameters()) for i in (2, 3)]
        found += layers[0] - layers[1]
    assert found == known.parameters


def test_names_are_found_whatever_their_case_or_owner():
    assert serving_configs.find("qwen/qwen3.5-4b")[0] == "Qwen3.5-4B"
    with pytest.raises(OptionError, match=r"nearest: Qwen3\.5-4B"):
        serving_configs.find("Qwen3.5-4")


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_alive(family, dtype):
    config = config_of(family)
    model = serving_model.random_model(config, dtype, CPU, seed=3)
    gates = [(name, x) for name, x in model.named_parameters() if name.endswith(("A_log", "dt_bias"))]
    assert len(gates) == 6
    for name, value in gates:
        assert value.dtype == torch.float32
        low, high = (1, 16) if name.endswith("A_log") else (1e-3, 1e-1)
        inside = value.exp() if name.endswith("A_log") else torch.nn.functional.softplus(value)
        assert low * 0.99 <= float(inside.min()) <= float(inside.max()) <= high * 1.01
    others = {x.dtype for name, x in model.named_parameters() if not name.endswith(("A_log", "dt_bias"))}
    assert others == {dtype}
    norms = {name: x for name, x in model_of(family).named_parameters() if "norm" in name}
    mine = dict(model.named_parameters())
    assert norms
    assert all(torch.equal(mine[name].float(), x) for name, x in norms.items())  # as the family initialises them
    with torch.inference_mode():
        logits = model(prompt(2, 40)).logits.float()
    assert logits.isfinite().all()
    assert float(logits.std(-1).min()) > 1e-3
    again = serving_model.random_model(config_of(family), dtype, CPU, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_config_file_and_its_first_layers(tmp_path):
    config_of("kimi_linear").save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        plan = serving_model.plan(request_of("--config", source, "--layers", 3))
        assert (plan.random, plan.layers, plan.all_layers, plan.positions) == (True, 3, 4, 512)
        assert plan.config.layer_types == ["linear_attention", "linear_attention", "full_attention"]
        assert plan.config.mlp_layer_types == ["dense", "sparse", "sparse"]
        model = serving_model.random_model(plan.config, torch.float32, CPU)
        assert len(model.model.layers) == 3


def test_the_text_part_of_a_model_with_vision(tmp_path):
    text = config_of("qwen3_5_text").to_dict()
    AutoConfig.for_model("qwen3_5", text_config=text).save_pretrained(tmp_path)
    plan = serving_model.plan(request_of("--config", tmp_path))
    assert plan.config.model_type == "qwen3_5_text"


@pytest.mark.parametrize(
    ("layers", "said"),
    [(2, "leaves one kind of layer only; the model needs its first 3"), (5, "exceeds the 4 of")],
)
def test_impossible_numbers_of_layers(tmp_path, layers, said):
    config_of("qwen3_5_text").save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=said):
        serving_model.plan(request_of("--config", tmp_path, "--layers", layers))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("no json", ModelFilesError),
        ("[1]", ModelFilesError),
        (json.dumps(dict(model_type="llama")), UnsupportedModelError),
        (json.dumps(dict(model_type="qwen3_5_text", hidden_size="wide")), ModelFilesError),
    ],
)
def test_bad_config_files(tmp_path, content, error):
    file = tmp_path / "my.json"
    file.write_text(content)
    with pytest.raises(error):
        serving_model.plan(request_of("--config", file))
