"""The MTP head: names and mathematics of Qwen3.5's, one step at a time as all at once, and files that do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from replayssm.errors import ModelFilesError, ModelNotFoundError, ShapeError, UnsupportedModelError
from replayssm.models.mtp import MTPHead, has_mtp, load_mtp
from tests.models.tiny import VOCAB, config_of, model_of, prompt

# As listed in the checkpoints of the family: the head's own tensors, then those of its one layer.
LAYER = {
    "": ("input_layernorm", "post_attention_layernorm"),
    "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    "mlp.": ("gate_proj", "up_proj", "down_proj"),
}
NAMES = [
    *("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"),
    *(f"layers.0.{part}{name}.weight" for part, names in LAYER.items() for name in names),
]


def random_head(model):
    torch.manual_seed(5)
    head = MTPHead(model).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2)
    return head


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3_5_text")


@pytest.fixture(scope="module")
def head(model):
    return random_head(model)


@pytest.fixture
def folder(tmp_path, model, head):
    model.save_pretrained(tmp_path)
    save_file({f"mtp.{name}": value for name, value in head.state_dict().items()}, tmp_path / "mtp.safetensors")
    return tmp_path


@pytest.fixture
def text(model):
    """Hidden states and the token after each, of two rows."""
    ids = prompt(2, 12)
    with torch.no_grad():
        return model.model(ids[:, :-1]).last_hidden_state, ids[:, 1:]


def merge(folder):
    """Move the head's tensors among the model's."""
    weights, mtp = folder / "model.safetensors", folder / "mtp.safetensors"
    save_file({**load_file(weights), **load_file(mtp)}, weights, {"format": "pt"})
    mtp.unlink()


def shard(folder):
    """Two shards and an index, the head in the second."""
    weights, mtp = folder / "model.safetensors", folder / "mtp.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    mtp.rename(folder / "model-00002-of-00002.safetensors")
    files = sorted(folder.glob("model-0*"))
    index = {name: file.name for file in files for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_names_and_shapes_are_those_of_the_checkpoints(head):
    state = head.state_dict()
    assert sorted(state) == sorted(NAMES)
    assert state["fc.weight"].shape == (48, 96)
    assert state["layers.0.self_attn.q_proj.weight"].shape == (2 * 4 * 16, 48)


def test_the_mathematics(model, head, text):
    """Embedding before hidden state, both normed; then one stock layer and a norm."""
    hidden, ids = text

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)

    w = head.state_dict()
    embedded = model.get_input_embeddings()(ids)
    x = (
        torch.cat([norm(embedded, w["pre_fc_norm_embedding.weight"]), norm(hidden, w["pre_fc_norm_hidden.weight"])], -1)
        @ w["fc.weight"].T
    )
    position = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    causal = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
    x = head.layers[0](x, position_embeddings=position, attention_mask=causal)
    want = norm(x, w["norm.weight"])
    torch.testing.assert_close(head(hidden, ids), want, rtol=1e-4, atol=1e-5)
    assert head.logits(want).shape == (2, 11, VOCAB)


def test_step_by_step_equals_all_at_once(head, text):
    hidden, ids = text
    whole = head(hidden, ids)
    for sizes in ([1] * 11, [4, 1, 5, 1], [10, 1]):
        cache, at, parts = head.new_cache(), 0, []
        for size in sizes:
            parts.append(head(hidden[:, at : at + size], ids[:, at : at + size], cache))
            at += size
        assert cache.get_seq_length() == 11
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_left_padded_rows_equal_rows_alone(head, text):
    hidden, ids = text
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = head.new_cache()
    first = head(hidden[:, :8], ids[:, :8], cache, position_ids=positions[:, :8], attention_mask=mask[:, :8])
    rest = head(hidden[:, 8:], ids[:, 8:], cache, position_ids=positions[:, 8:], attention_mask=mask)
    alone = head(hidden[:1, 4:], ids[:1, 4:])
    torch.testing.assert_close(torch.cat([first, rest], 1)[:1, 4:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_drafts_chain_the_heads_own_output_and_leave_the_cache_at_the_given_pairs(head, text, padded):
    hidden, ids = text
    mask = torch.ones(2, 11, dtype=torch.long) if padded else None
    cache = head.new_cache()
    head(hidden[:, :6], ids[:, :6], cache)
    drafted = head.draft(hidden[:, 6:], ids[:, 6:], 3, cache, attention_mask=mask)
    assert drafted.shape == (2, 3)
    assert cache.get_seq_length() == 11
    want, h, n = [], hidden, ids
    for _ in range(3):
        out = head(h, n)
        want.append(head.logits(out[:, -1]).argmax(-1))
        h, n = torch.cat([h, out[:, -1:]], 1), torch.cat([n, want[-1][:, None]], 1)
    assert torch.equal(drafted, torch.stack(want, 1))
    again = head.draft(hidden[:, -1:], ids[:, -1:], 1, position_ids=torch.full((2, 1), 10))
    assert again.shape == (2, 1)


@pytest.mark.parametrize("arrange", [None, merge, shard])
def test_loads_from_every_arrangement_and_stock_loading_is_untroubled(folder, model, head, text, arrange):
    if arrange:
        arrange(folder)
    assert has_mtp(folder)
    loaded = load_mtp(folder, model)
    assert same(loaded.state_dict(), head.state_dict())
    assert not loaded.training
    assert torch.equal(loaded(*text), head(*text))
    stock, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert same(stock.state_dict(), model.state_dict())
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_head_has_the_models_dtype(folder, model):
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in load_mtp(folder, half).parameters()} == {torch.bfloat16}


def test_a_folder_without_a_head(folder, model):
    (folder / "mtp.safetensors").unlink()
    assert not has_mtp(folder)
    with pytest.raises(ModelFilesError, match=r"no tensors named mtp\.\*"):
        load_mtp(folder, model)


def test_missing_unknown_and_misshaped_tensors_are_named(folder, model):
    file = folder / "mtp.safetensors"
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :90].contiguous()
    tensors["mtp.layers.1.x"] = tensors.pop("mtp.norm.weight")
    save_file(tensors, file)
    with pytest.raises(ModelFilesError) as caught:
        load_mtp(folder, model)
    for words in ("mtp.norm.weight is missing", "mtp.layers.1.x is not known", "mtp.fc.weight is [48, 90], the config"):
        assert words in str(caught.value)
    assert "[48, 96]" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 9, -1])
def test_truncated_file(folder, model, keep):
    file = folder / "mtp.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFilesError, match="truncated or damaged"):
        load_mtp(folder, model)


def test_missing_shard(folder, model):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00002"):
        load_mtp(folder, model)


def test_models_without_a_known_head(folder):
    with pytest.raises(UnsupportedModelError, match="kimi_linear"):
        load_mtp(folder, model_of("kimi_linear"))
    two = AutoModelForCausalLM.from_config(config_of("qwen3_5_text", mtp_num_hidden_layers=2))
    with pytest.raises(UnsupportedModelError, match="mtp_num_hidden_layers = 2"):
        MTPHead(two)


def test_shapes_are_checked(head, text):
    hidden, ids = text
    with pytest.raises(ShapeError, match=r"\[2, 10, 48\]"):
        head(hidden, ids[:, :-1])
