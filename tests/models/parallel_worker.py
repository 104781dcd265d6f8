"""What each of two processes does for test_parallel: every case on its share of the model, results into a file."""

from __future__ import annotations

from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import DynamicCache

import replayssm
from replayssm.engine.params import SamplingParams
from replayssm.errors import ReplayError
from replayssm.models.families import layer_specs
from replayssm.models.loading import LoadedModel
from replayssm.models.parallel import parallelize, random_bits, ranks_of
from replayssm.models.parallel_cuts import decoder_layers, is_linear
from tests.models import tiny

RANKS = 2
TOKENS = 12
OPTIONS = {"ring_len": 4, "max_requests": 4, "page_size": 4, "context": 64, "mode": "replay", "memory": 2**30}
_GDN = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
_KDA = {"linear_num_heads": 4}
# Name of a case -> family, and what is different from tiny's config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", _GDN),
    "qwen3_5_text": ("qwen3_5_text", {**_GDN, "attention_bias": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_GDN, "num_key_value_heads": 1}),
    "qwen4_exp_text": ("qwen4_exp_text", _GDN),
    "olmo_hybrid": ("olmo_hybrid", _GDN),
    "olmo_hybrid, one KV head": ("olmo_hybrid", {**_GDN, "num_key_value_heads": 1}),
    "kimi_linear": ("kimi_linear", _KDA),
    "bailing_hybrid": ("bailing_hybrid", _KDA),
    "glm5_next": ("glm5_next", {"text_config": {**tiny.CONFIGS["glm5_next"]["text_config"], **_KDA}}),
}
WITHOUT_ENGINE = "qwen4_exp_text"
SHORT_OF_MEMORY = "qwen3_5_text"  # where one rank has less of it than the other
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, n=2)


def model_of(case: str):
    """The whole model, the same in every process."""
    family, changes = CASES[case]
    with patch.dict(tiny.CONFIGS, {family: {**tiny.CONFIGS[family], **changes}}):
        model = tiny.model_of.__wrapped__(family)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias") or name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.normal_(0, 0.3, generator=generator)
    return model


def loaded_of(model) -> LoadedModel:
    return LoadedModel(model, None, None, model.config, layer_specs(model.config.get_text_config(decoder=True)))


def generated(model, prompts) -> list[list[int]]:
    """Greedy tokens of each prompt alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        found.append(out[0, len(prompt) :].tolist())
    return found


def of_engine(loaded: LoadedModel, prompts, **options) -> dict[str, Any]:
    with replayssm.LLM(loaded, **{**OPTIONS, **options}) as llm:
        done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS))
        (sampled,) = llm.generate([prompts[0]], SAMPLED)
        return {
            "tokens": [list(one.token_ids) for one in done],
            "reasons": {one.finish_reason for one in done},
            "preemptions": sum(one.preemptions for one in done),
            "sampled": [one.token_ids for one in sampled.outputs],
            "plan": llm.engine.plan,
        }


def tight(plan) -> int:
    """Memory for so few pages that requests of the test cannot all stay."""
    return plan.weights + plan.work + plan.slots * plan.slot_bytes + 18 * plan.page_bytes


@torch.no_grad()
def layer_outputs(model) -> list[torch.Tensor]:
    """Of every layer's linear attention, and MLP: a prompt of 7 tokens, then one more by replay."""
    found = []
    generator = torch.Generator().manual_seed(3)
    for layer in decoder_layers(model):
        inputs = [torch.randn(2, t, 48, generator=generator) for t in (7, 1)]
        linear = next((x for x in layer.children() if is_linear(x)), None)
        cache = DynamicCache(config=model.config)
        for x in inputs:
            if linear is not None:
                found.append(linear(x, cache_params=cache))
            found.append(layer.mlp(x))
    return found


def case_results(case: str, prompts, rank: int) -> dict[str, Any]:
    whole = model_of(case)
    loaded = parallelize(loaded_of(deepcopy(whole)))
    model = loaded.model
    assert ranks_of(model).size == RANKS
    with replayssm.enable(whole, 4, mode="replay"), replayssm.enable(model, 4, mode="replay") as handle:
        found = {
            "specs": loaded.specs,
            "layer_specs": handle.specs,
            "wanted": layer_outputs(whole),
            "outputs": layer_outputs(model),
            "generated": generated(model, prompts),
            "parameters": {name: tuple(x.shape) for name, x in model.named_parameters()},
        }
    if case != WITHOUT_ENGINE:
        found["engine"] = of_engine(loaded, prompts)
    if case == SHORT_OF_MEMORY:
        memory = tight(found["engine"]["plan"]) if rank else 2**30
        found["short"] = of_engine(loaded, prompts, memory=memory)
    return found


def error_of(model) -> str:
    before = {name: x.data_ptr() for name, x in model.named_parameters()}
    try:
        parallelize(model)
    except ReplayError as error:
        assert before == {name: x.data_ptr() for name, x in model.named_parameters()}
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors() -> dict[str, str]:
    model = model_of("qwen3_5_text")
    found = {"odd": error_of(tiny.model_of("kimi_linear")), "none": error_of(torch.nn.Linear(2, 2))}
    with replayssm.enable(model):
        found["enabled"] = error_of(model)
    found["twice"] = error_of(parallelize(model))
    return found


def work(rank: int, folder: str, prompts: dict[str, list]) -> None:
    torch.set_num_threads(1)
    store = f"file://{Path(folder, 'store')}"
    dist.init_process_group("gloo", store, timedelta(seconds=60), rank=rank, world_size=RANKS)
    found: dict[str, Any] = {case: case_results(case, prompts[case], rank) for case in CASES}
    found["errors"] = errors()
    found["bits"] = random_bits(parallelize(tiny.model_of("qwen3_5_text")))(63)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()
