"""The model to serve: one with weights, or random weights of a config, made on the device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from replayssm.bench import serving_configs
from replayssm.bench.serving_request import ServingRequest
from replayssm.errors import ModelFilesError, OptionError
from replayssm.models.families import family_of, layer_specs
from replayssm.models.loading import LoadedModel, find_model, load_config, load_model

DECAY = (1.0, 16.0)  # A, uniform
STEP = (1e-3, 1e-1)  # what softplus makes of dt_bias, log-uniform: decays of a step between e^-1.6 and e^-0.001
CONV_STD = 0.5  # four taps: windows keep the size of their inputs


class Plan(NamedTuple):
    """What will be loaded or made: `layers` of `all_layers` run, `positions` is the model's context."""

    name: str
    random: bool
    config: Any
    layers: int
    all_layers: int
    positions: int


def plan(request: ServingRequest) -> Plan:
    """From the request and config files alone.

    Raises `OptionError`, `ModelNotFoundError`, `ModelFilesError`, `UnsupportedModelError`, `ShapeError`.
    """
    if request.config is None:
        assert request.model is not None
        config: Any = load_config(find_model(request.model))
        name = request.model
    else:
        name, config = _config(request.config)
    text = config.get_text_config(decoder=True)
    whole = int(text.num_hidden_layers)
    layers = request.args.layers or whole
    if layers < whole:
        _cut(text, layers)
    elif layers > whole:
        raise OptionError(f"--layers {layers} exceeds the {whole} of {name}")
    layer_specs(text)
    return Plan(name, request.config is not None, config, layers, whole, int(text.max_position_embeddings))


def make(request: ServingRequest, plan: Plan, device: torch.device) -> LoadedModel:
    """The model, on the device."""
    if not plan.random:
        return load_model(plan.name, dtype=request.dtype, device=str(device))
    model = random_model(plan.config, getattr(torch, request.dtype), device, request.args.seed)
    specs = layer_specs(plan.config.get_text_config(decoder=True))
    return LoadedModel(model, cast(Any, None), Path(plan.name), plan.config, specs)  # without a tokenizer


def random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model in eval mode, initialised as its family is, but for gates and convs.

    Gates decay as those of a trained model roughly do, in fp32; the families' own draw forgets at once.
    """
    auto: Any = AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = AutoModelForImageTextToText
    torch.manual_seed(seed)
    with torch.device(device):
        model = auto.from_config(config, dtype=dtype)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                module.A_log = _parameter(torch.empty_like(module.A_log, dtype=torch.float32).uniform_(*DECAY).log_())
                low, high = (math.log(x) for x in STEP)
                step = torch.empty_like(module.dt_bias, dtype=torch.float32).uniform_(low, high).exp_()
                module.dt_bias = _parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is `step`
            if hasattr(module, "conv1d"):
                module.conv1d.weight.normal_(0, CONV_STD)
    return model.eval()


def _parameter(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def _config(text: str) -> tuple[str, Any]:
    """By name, or from a config.json or its folder; of a model with vision only the text part where it stands alone."""
    path = Path(text).expanduser()
    if not path.exists():
        name, fields = serving_configs.find(text)
        return name, AutoConfig.for_model(**fields)
    if path.is_dir():
        config: Any = load_config(path)
    else:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            model_type = fields.get("model_type")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelFilesError(f"--config {path} is no JSON object: {error}") from error
        family_of(model_type)
        try:
            config = AutoConfig.for_model(**fields)
        except Exception as error:  # transformers validates configs with several exception types
            raise ModelFilesError(f"--config {path} is not a usable {model_type} config: {error}") from error
    alone: Any = AutoModelForCausalLM
    inner = config.get_text_config(decoder=True)
    return str(path), inner if type(inner) in alone._model_mapping else config


def _cut(text: Any, layers: int) -> None:
    """Keep the first `layers` layers, among which there must be both kinds."""
    kinds = list(text.layer_types)
    least = max(kinds.index(kind) + 1 for kind in ("linear_attention", "full_attention") if kind in kinds)
    if layers < least:
        raise OptionError(
            f"--layers {layers} leaves one kind of layer only; the model needs its first {least} at least"
        )
    text.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(value := getattr(text, name, None), list):
            setattr(text, name, value[:layers])
