"""What the training scripts compute: the chunked delta rules, their gradients, batches and stored files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from replayssm.reference.serial import recurrent_step

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import delta_rules
import evaluate_model
import prepare_data
import train_model
import train_mtp
import training


def serial(query, key, value, g, beta):
    """Token by token, in the dtype of the inputs; g is [batch, time, heads] or [batch, time, heads, K]."""
    heads = value.shape[2]
    query, key = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(heads // x.shape[2], 2)
        for x in (query, key)
    )
    query = query * query.shape[-1] ** -0.5
    g = g if g.ndim == 4 else g.unsqueeze(-1)
    state, out = value.new_zeros(value.shape[0], heads, value.shape[-1], key.shape[-1]), []
    for t in range(value.shape[1]):
        o, _, state = recurrent_step(state, query[:, t], key[:, t], value[:, t], g[:, t], beta[:, t])
        out.append(o)
    return torch.stack(out, 1)


def inputs(kind, batch, length, strength, seed=0):
    """fp64 inputs with 2 heads (GDN: 2 key heads, 4 value heads), K = 8, V = 6; decays from none to e^-strength."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    heads = 2 if kind == "kda" else 4
    shape = (batch, length, heads, 8) if kind == "kda" else (batch, length, heads)
    g = -strength * torch.rand(*shape, generator=gen, dtype=torch.float64) ** 4
    beta = torch.rand(batch, length, heads, generator=gen, dtype=torch.float64)
    return draw(batch, length, 2, 8), draw(batch, length, 2, 8), draw(batch, length, heads, 6), g, beta


RULES = {"gdn": delta_rules.chunk_gdn, "kda": delta_rules.chunk_kda}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(("length", "strength"), [(1, 1.0), (63, 1.0), (64, 0.01), (200, 1.0), (130, 300.0)])
def test_chunked_rules_and_their_gradients_equal_the_recurrence(kind, length, strength):
    """fp32 against fp64, with decays so strong that e^-total alone would overflow."""
    wide = [x.requires_grad_() for x in inputs(kind, 2, length, strength)]
    narrow = [x.detach().float().requires_grad_() for x in wide]
    want, (got, state) = serial(*wide), RULES[kind](*narrow)
    assert state is None
    assert got.dtype == torch.float32
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (want * weight).sum().backward()
    (got * weight.float()).sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(narrow, wide, strict=True):
        assert mine.grad.isfinite().all()
        scale = theirs.grad.abs().max()
        assert (mine.grad.double() - theirs.grad).abs().max() <= 3e-4 * scale


def test_products_with_decay_and_their_gradients():
    """The products alone, in fp64, against the plain formula and by finite differences."""
    gen = torch.Generator().manual_seed(3)
    x, k = (torch.randn(*s, generator=gen, dtype=torch.float64) for s in ((2, 8, 2, 3), (2, 8, 3)))
    total = -torch.rand(2, 8, 3, generator=gen, dtype=torch.float64).cumsum(1)
    later = torch.ones(8, 8, dtype=torch.bool).triu()
    decay = (total[:, :, None] - total[:, None]).exp()
    want = torch.einsum("bisc,bjc,bijc->bisj", x, k, decay).masked_fill(later[:, None], 0)
    args = [t.requires_grad_() for t in (x, k, total)]
    torch.testing.assert_close(delta_rules.DecayedProducts.apply(*args), want)
    assert torch.autograd.gradcheck(delta_rules.DecayedProducts.apply, args)


@pytest.mark.parametrize(("kind", "module"), [("gdn", "qwen3_5"), ("kda", "kimi_linear")])
def test_rules_stand_in_for_those_of_transformers(kind, module):
    """Same arguments, same result as the function that they replace while training."""
    names = {"qwen3_5": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}
    modeling = __import__(f"transformers.models.{module}.modeling_{module}", fromlist=["x"])
    stock = getattr(modeling, names[module])
    query, key, value, g, beta = (x.float() for x in inputs(kind, 2, 150, 0.5))
    options = dict(initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)
    want, _ = stock(query, key, value, g=g, beta=beta, **options)
    got, _ = RULES[kind](query, key, value, g=g, beta=beta, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def data():
    """Arrays as `prepare_data.py` writes them: end of text is 0, the newline 1, prose from 10 on, tasks below."""
    rng = np.random.default_rng(0)
    prose = [np.append(rng.integers(10, 40, size=n), 0) for n in rng.integers(20, 60, size=30)]
    tasks = [np.array([2, 3, 1, 4, 5 + i % 4, 0]) for i in range(40)]
    parts = (np.concatenate(part).astype(np.uint16) for part in (prose, prose[:5], tasks, tasks[:7]))
    return training.Data(*parts, 40, 0, 1)


def tiny(arch, vocabulary=40):
    """The shipped architecture with small sizes."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=4)
    layers = dict(layer_types=["linear_attention", "full_attention"] * 2)
    if arch == "gdn":
        heads = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
        name, more = "qwen3_5_text", dict(num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, **heads)
    else:
        latent = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=2)
        name, more = "kimi_linear", dict(linear_num_heads=2, linear_head_dim=8, mlp_layer_types=["dense"] * 4, **latent)
    ends = dict(bos_token_id=None, eos_token_id=0, pad_token_id=None)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=vocabulary, **sizes, **layers, **more, **ends)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture
def fast():
    undo = training.use_fast_rules()
    yield
    undo()


def options(**changes):
    parser = argparse.ArgumentParser()
    training.add_common_options(parser, steps=30, lr=1e-2, warmup=3, decay=0.0, drop=0.0)
    small = dict(device="cpu", tokens_per_step=128, lengths=[32, 64], eval_every=10)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **small, **changes})


def test_batches_hold_the_share_of_problems_and_shift_by_one(data):
    source = training.batches(data, 0.25, 128, [32, 64], np.random.default_rng(0))
    drawn = [next(source) for _ in range(60)]
    assert {tuple(inputs.shape) for inputs, _ in drawn} == {(4, 32), (2, 64)}
    for inputs, targets in drawn:
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    ids = torch.cat([inputs.flatten() for inputs, _ in drawn])
    assert 0.15 < float(((ids > 1) & (ids < 10)).float().mean()) / (4 / 6) < 0.35


def test_batches_use_every_problem_before_one_comes_back(data):
    source = training.batches(data._replace(train=data.train[:200]), 0.5, 64, [64], np.random.default_rng(0))
    assert next(source)[0].shape == (1, 64)


def test_usable_lengths():
    assert training.usable_lengths(options(lengths=[48, 64])) == [64]
    with pytest.raises(SystemExit, match="multiple"):
        training.usable_lengths(options(lengths=[48]))


def test_schedule_ends_by_steps_or_by_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    schedule = training.Schedule(options(minutes=1.0, steps=100, lr=1.0, warmup=10))
    assert schedule.done(0) == 0
    assert schedule.done(50) == 0.5
    assert schedule.rate(4, 0.0) == 0.5
    now[0] += 45
    assert schedule.done(50) == 0.75
    assert schedule.done(99) == 0.99
    now[0] += 15
    assert schedule.done(50) == 1.0
    assert schedule.rate(50, 1.0) == pytest.approx(0.02)


@pytest.mark.parametrize("arch", ["gdn", "kda"])
def test_training_lowers_the_loss_and_keeps_the_best(arch, data, fast):
    model, rows, kept = tiny(arch).train(), [], []

    def loss_of(inputs, targets):
        return torch.nn.functional.cross_entropy(training.logits_of(model, inputs).flatten(0, 1), targets.flatten())

    def evaluate():
        loss = training.mean_loss(model, data.valid, 64)
        return {"choice": loss if len(rows) != 1 else 99.0, "task": training.task_scores(model, data, 3)[0]}

    training.train(options(), model, loss_of, evaluate, lambda row: kept.append(row["step"]), rows.append, data)
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert kept == [10, 30]
    assert rows[-1]["train_loss"] < 0.9 * rows[0]["train_loss"]
    assert rows[-1]["task"] < rows[0]["task"]


def test_a_time_limit_stops_in_time_and_evaluates(data, fast):
    model, rows = tiny("gdn").train(), []

    def loss_of(inputs, targets):
        return torch.nn.functional.cross_entropy(training.logits_of(model, inputs).flatten(0, 1), targets.flatten())

    args = options(steps=10**6, minutes=0.02, eval_every=10**6)
    training.train(args, model, loss_of, lambda: {"choice": 1.0}, lambda row: None, rows.append, data)
    assert len(rows) == 1
    assert rows[0]["step"] < 10**6


def test_task_scores_count_whole_solutions_alone(data):
    """A model that knows the rules of these problems, but not the one of them that is in the prompt."""

    class Knows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.anchor = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, attention_mask, use_cache):
            logits = torch.zeros(*input_ids.shape, 40)
            logits[:, :2, 39] = 9.0  # wrong in the prompt, which does not count
            for column, token in ((3, 4), (4, 5), (5, 0)):
                logits[:, column, token] = 9.0
            return type("Output", (), {"logits": logits})

    nats, right = training.task_scores(Knows(), data, 3)
    assert right == pytest.approx(2 / 7)  # problems 0 and 4 of the seven
    assert nats > 0.5


@pytest.mark.parametrize("arch", ["gdn", "kda"])
def test_stored_models_load_with_their_types(arch, tmp_path):
    model = tiny(arch)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_text("{}")
    training.save_model(model, tokenizer, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for n, t in stored.items() if n.endswith(("A_log", "dt_bias"))} == {torch.float32}
    assert {t.dtype for n, t in stored.items() if not n.endswith(("A_log", "dt_bias"))} == {torch.bfloat16}
    assert ("lm_head.weight" in stored) == (arch == "kda")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-2, atol=0)


@pytest.mark.parametrize("arch", ["gdn", "kda"])
def test_shipped_architectures_fit_their_file_and_start_with_a_range_of_decays(arch):
    model = train_model.ARCHITECTURES[arch](4096, 0)
    assert sum(p.numel() for p in model.parameters()) * 2 < 16 * 2**20 - 2**16
    rates = [
        (p.detach().exp().flatten(), dict(model.named_parameters())[n.replace("A_log", "dt_bias")])
        for n, p in model.named_parameters()
        if n.endswith("A_log")
    ]
    assert len(rates) == 6
    steps = torch.cat([torch.nn.functional.softplus(bias.detach()) for _, bias in rates])
    assert 0.9e-3 < steps.min() < 3e-2
    assert 2e-2 < steps.max() < 1.1e-1
    assert all(1 <= rate.min() <= rate.max() <= 16 for rate, _ in rates)


def test_an_mtp_head_learns_to_agree_with_its_model(data, fast):
    model = tiny("gdn").eval().requires_grad_(False)
    model.get_input_embeddings().weight.normal_(0, 1)
    head = train_mtp.new_head(model).train()
    rows = []

    def loss_of(inputs, targets):
        mine, theirs = train_mtp.guesses(model, head, inputs, targets)
        assert mine.shape == theirs.shape == (*inputs[:, 1:].shape, 40)
        return torch.nn.functional.cross_entropy(mine.flatten(0, 1), theirs.flatten(0, 1).softmax(-1))

    def evaluate():
        loss, same = train_mtp.agreement(model, head, data.valid, 64)
        return {"choice": loss, "same": same}

    training.train(options(steps=60), head, loss_of, evaluate, lambda row: None, rows.append, data)
    assert rows[-1]["choice"] < rows[0]["choice"]
    assert rows[-1]["same"] > 0.3


def test_rates_of_a_head_that_guesses_perfectly_and_one_that_does_not():
    model = tiny("gdn").eval()
    head = train_mtp.new_head(model).eval()
    rows = torch.randint(1, 40, (2, 20)).tolist()
    rates = evaluate_model.mtp_rates(model, head, rows, 8)
    assert rates["tokens"] == 2 * 12
    with torch.no_grad():
        ids = torch.tensor(rows)
        hidden = model.model(ids[:, :-1]).last_hidden_state

        class Perfect(torch.nn.Module):
            def forward(self, given, next_ids):
                return torch.stack([h for h in hidden if torch.equal(h[:-1], given[0])])[:, 1:]

            def logits(self, states):
                return model.lm_head(states)

    rates = evaluate_model.mtp_rates(model, Perfect(), [rows[0]], 2)
    assert rates["same"] == 1.0
    assert rates["overlap"] == pytest.approx(1.0)
    assert rates["tokens"] == 18


def test_an_excerpt_has_whole_chapters_of_all_sources_and_keeps_its_limit():
    documents = [
        prepare_data.Document(source, f"{source} {i}", f"{source} {i}\n\n" + "x" * 100 * (i + 1))
        for source in ("a", "b")
        for i in range(4)
    ]
    text = prepare_data.excerpt(documents, 1000)
    chapters = [chapter.strip() for chapter in text.split(prepare_data.END_OF_TEXT)][:-1]
    assert chapters == [documents[i].text for i in (0, 4, 1, 5)]
    assert len(text.encode()) <= 1000
