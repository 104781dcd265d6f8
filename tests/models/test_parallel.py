"""A model on two processes answers as on one, and each holds its share. What the processes do is in parallel_worker."""

from __future__ import annotations

import dataclasses
import fnmatch
from types import SimpleNamespace

import pytest
import torch
from torch import multiprocessing

from replayssm.engine.llm import AsyncLLM
from replayssm.errors import OptionError, ShapeError, UnsupportedModelError
from replayssm.models import parallel
from replayssm.models.families import layer_specs
from replayssm.models.parallel import least, most, parallelize, random_bits, ranks_of
from replayssm.models.parallel_cuts import plan_of
from tests.models import parallel_worker as worker
from tests.models import tiny

LENGTHS = (1, 5, 18, 9)
GAP = 1e-3  # least distance of the two largest logits of a compared token
# fp32 eps × the longest chain of sums between a layer's input and output: hidden size, window, tokens, K, and the
# columns of the output projection; relative to the largest output
LAYER_TOLERANCE = torch.finfo(torch.float32).eps * (48 + 4 + 7 + 16 + 12 * 24)
ENGINES = [case for case in worker.CASES if case != worker.WITHOUT_ENGINE]


def answer_of(model, length: int) -> tuple[list[int], list[int]]:
    """A prompt that leads to no near tie, and stock tokens after it."""
    for seed in range(1000):
        ids = tiny.prompt(1, length, 1000 * seed + length)
        out = model.generate(
            ids, max_new_tokens=worker.TOKENS, do_sample=False, eos_token_id=None, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.stack(out.scores)[:, 0].topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > GAP:
            return ids[0].tolist(), out.sequences[0, length:].tolist()
    raise AssertionError("every prompt leads to a near tie")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> SimpleNamespace:
    """What one process finds (`wanted`) and what two find (`ranks`)."""
    folder = tmp_path_factory.mktemp("ranks")
    prompts, wanted = {}, {}
    for case in worker.CASES:
        model = worker.model_of(case)
        prompts[case], wanted[case] = zip(*(answer_of(model, length) for length in LENGTHS), strict=True)
    multiprocessing.spawn(worker.work, (str(folder), prompts), worker.RANKS)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(worker.RANKS)]
    return SimpleNamespace(wanted=wanted, ranks=ranks)


@pytest.mark.parametrize("case", worker.CASES)
def test_generate_gives_the_tokens_of_one_rank(results, case):
    for rank in results.ranks:
        assert rank[case]["generated"] == list(results.wanted[case])


@pytest.mark.parametrize("case", ENGINES)
def test_engine_gives_the_tokens_of_one_rank(results, case):
    for rank in results.ranks:
        found = rank[case]["engine"]
        assert found["reasons"] == {"length"}
        assert found["tokens"] == list(results.wanted[case])


@pytest.mark.parametrize("case", worker.CASES)
def test_a_cut_layer_gives_the_output_of_the_whole_one(results, case):
    for rank in results.ranks:
        assert len(rank[case]["outputs"]) == 2 * (4 + 3)
        for got, want in zip(rank[case]["outputs"], rank[case]["wanted"], strict=True):
            assert float((got - want).abs().max()) <= LAYER_TOLERANCE * float(want.abs().max())


@pytest.mark.parametrize("case", worker.CASES)
def test_ranks_have_the_same_outputs_bit_for_bit(results, case):
    first, second = (rank[case]["outputs"] for rank in results.ranks)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", worker.CASES)
def test_each_rank_holds_half_of_heads_and_state(results, case):
    whole = layer_specs(worker.model_of(case).config.get_text_config(decoder=True))
    half = tuple(
        dataclasses.replace(one, num_k_heads=one.num_k_heads // 2, num_v_heads=one.num_v_heads // 2) for one in whole
    )
    for rank in results.ranks:
        assert rank[case]["specs"] == rank[case]["layer_specs"] == half
        if case in ENGINES:
            plan = rank[case]["engine"]["plan"]
            state = plan.slot_bytes - plan.ring_bytes - plan.conv_bytes - 4  # and the cursor
            assert 2 * state == sum(one.state_array().nbytes for one in whole)


@pytest.mark.parametrize("case", ENGINES)
def test_random_seeds_are_the_same_on_all_ranks(results, case):
    first, second = (rank[case]["engine"]["sampled"] for rank in results.ranks)
    assert first == second
    assert len(first) == 2
    assert first[0] != first[1]


def test_random_bits_are_drawn_alike(results):
    first, second = (rank["bits"] for rank in results.ranks)
    assert first == second


def test_ranks_plan_alike_for_the_one_with_least_memory(results):
    first, second = (rank[worker.SHORT_OF_MEMORY]["short"] for rank in results.ranks)
    assert first["plan"] == second["plan"]
    assert first["plan"].pages < results.ranks[0][worker.SHORT_OF_MEMORY]["engine"]["plan"].pages
    assert first["preemptions"] == second["preemptions"] > 0
    assert first["tokens"] == second["tokens"] == list(results.wanted[worker.SHORT_OF_MEMORY])


def test_parallelize_refuses_what_it_cannot_cut(results):
    for rank in results.ranks:
        found = rank["errors"]
        assert found["odd"] == (
            "ShapeError: 3 linear-attention key heads cannot be shared evenly by 2 ranks; this model runs on 1 rank"
        )
        assert "UnsupportedModelError: Linear has no linear-attention layer" in found["none"]
        assert "OptionError: replay is enabled" in found["enabled"]
        assert "OptionError: the model is cut for 2 ranks already" in found["twice"]


@pytest.mark.parametrize("case", worker.CASES)
def test_what_transformers_plan_cuts_is_cut(results, case):
    """Outside linear layers, and where its plan does not gather again what it cut."""
    model = worker.model_of(case)
    text = model.config.get_text_config(decoder=True)
    prefix = "model.language_model." if case == "glm5_next" else "model."
    dims = {"colwise": (0, -2), "packed_colwise": (-2, -2), "rowwise": (-1, -1)}
    checked = 0
    for name, parameter in model.named_parameters():
        for pattern, style in text.base_model_tp_plan.items():
            module = name.removesuffix(".weight")
            if style not in dims or name.endswith(".bias") or not fnmatch.fnmatch(module, prefix + pattern):
                continue
            local, whole = results.ranks[0][case]["parameters"][name], list(parameter.shape)
            if text.num_key_value_heads > 1 or not name.endswith(("k_proj.weight", "v_proj.weight")):
                whole[dims[style][0]] //= 2
            assert list(local) == whole, name
            checked += 1
    assert checked


@pytest.mark.parametrize("case", worker.CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_shares_of_all_ranks_are_the_whole(case, size):
    model = worker.model_of(case)
    plans = [plan_of(model, size, rank) for rank in range(size)]
    kv_heads = model.config.get_text_config(decoder=True).num_key_value_heads
    for cuts in zip(*(plan.cuts for plan in plans), strict=True):
        one, pieces = cuts[0], min(kv_heads, size) if cuts[0].style == "kv" else size
        assert {cut.share.pieces for cut in cuts} == {pieces}
        assert [cut.share.which for cut in cuts] == [rank * pieces // size for rank in range(size)]
        assert sum(one.parts) == getattr(one.owner, one.name).shape[one.dim]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        (
            {"intermediate_size": 63, "num_key_value_heads": 4, "linear_num_key_heads": 12},
            3,
            "4 attention heads, 4 key/value heads cannot be shared evenly by 3 ranks; this model runs on 1 rank",
        ),
        ({}, 8, "4 attention heads, 4 linear-attention key heads .* by 8 ranks; this model runs on 1, 2, 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 key/value heads .* on 1, 2 ranks"),
        ({"intermediate_size": 65}, 2, "65 columns of an MLP cannot be shared evenly by 2 ranks; .* on 1 rank"),
    ],
)
def test_sizes_that_do_not_divide(changes, size, message):
    config = tiny.config_of("qwen3_5_text", **{**worker.CASES["qwen3_5_text"][1], **changes})
    model = tiny.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ShapeError, match=message):
        plan_of(model, size, 0)


def test_a_parameter_that_is_not_known_is_refused():
    model = worker.model_of("qwen3_5_text")
    model.model.layers[2].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match=r"Qwen3_5Attention has a parameter 'sinks' \[4\]"):
        plan_of(model, 2, 0)


def test_projections_that_are_not_plain_are_refused():
    class Linear4bit(torch.nn.Linear):
        pass

    model = worker.model_of("kimi_linear")
    model.model.layers[0].mlp.up_proj.__class__ = Linear4bit
    with pytest.raises(UnsupportedModelError, match=r"'up_proj.weight' of KimiLinearMLP belongs to a Linear4bit"):
        plan_of(model, 2, 0)


def test_without_torch_distributed():
    model = tiny.model_of("qwen3_5_text")
    with pytest.raises(OptionError, match=r"torch.distributed is not initialised; start the processes with torchrun"):
        parallelize(model)
    assert ranks_of(model) is None
    assert (least(model, 3), most(model, 4)) == (3, 4)
    assert random_bits(model) is parallel.random.getrandbits


def test_async_llm_refuses_a_shared_model():
    loaded = worker.loaded_of(worker.model_of("qwen3_5_text"))
    loaded.model._replay_ranks = parallel.Ranks(None, 2, 0)
    with pytest.raises(OptionError, match="shared by ranks"):
        AsyncLLM(loaded)
