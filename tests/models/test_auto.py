"""Mode `auto`: each batch size takes the route of the policy, and no change of route changes a token.

The tests list a CPU in the table, so that one row of a tiny model decodes packed and two rows by replay, or the other
way round.
"""

from __future__ import annotations

import copy
import inspect
import random

import pytest
import torch
from transformers import DynamicCache

import replayssm
from replayssm import ops
from replayssm.kernels import policy
from replayssm.models.cache import ReplayCache, ReplayLayer
from replayssm.models.layers import ADAPTERS
from tests.models.test_parity import assert_same, greedy
from tests.models.tiny import FAMILIES, model_of, prompt

L = 5
HEADS = {"gdn": 6, "kda": 3}  # of the tiny models


def from_two_rows(monkeypatch):
    table = {(kda, 4): {1: 2 * HEADS["kda" if kda else "gdn"]} for kda in (False, True)}
    monkeypatch.setitem(policy.FROM_HEADS, "cpu", table)


def up_to_one_row(monkeypatch):
    monkeypatch.setattr(ops, "decode_route", lambda state, ring_len, rows, is_kda: ("packed", "replay")[rows == 1])


POLICIES = {"replay from 2 rows on": (from_two_rows, 2), "replay for 1 row": (up_to_one_row, 1)}


@pytest.fixture(params=POLICIES)
def replayed(request, monkeypatch):
    """Batch sizes 1 and 2 take different routes; the one that replays."""
    install, rows = POLICIES[request.param]
    install(monkeypatch)
    return rows


def tokens(model, ids, new, cache=None):
    mask = torch.ones_like(ids)  # else `generate` masks what looks like padding in the text so far
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, past_key_values=cache)


def layers_of(cache):
    return [layer for layer in cache.layers if isinstance(layer, ReplayLayer)]


def linear_layers(model):
    return [m for m in model.modules() if type(m).__name__.removeprefix("Replay") in ADAPTERS]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_gives_the_same_tokens(family, rows, replayed):
    model, ids = model_of(family), prompt(rows, 9)
    stock = greedy(model, ids, 24)
    for mode in ("auto", "replay", "packed"):
        with replayssm.enable(model, L, mode=mode), ops.count_traffic() as traffic:
            ours = greedy(model, ids, 24)
        assert_same(ours, stock)
        replays = mode == "replay" or (mode == "auto" and rows == replayed)
        totals = traffic.totals()
        assert totals.rows == 3 * 23 * rows
        assert (totals.appends, totals.flushes) == ((3 * 19 * rows, 3 * 4 * rows) if replays else (0, 0))
        for layer in layers_of(ours[2].past_key_values):
            assert (layer.ring is not None) == replays
            assert layer.cursor.tolist() == [23 % L * replays] * rows


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_changes_inside_one_cache(family, replayed):
    """2 rows, 1, 2 and 1 again: every change comes upon a part-full ring, and takes the other route from there."""
    model, ids = model_of(family), prompt(2, 9)
    stock = tokens(model, ids, 7 + 8 + 6 + 9)
    cache, appends = DynamicCache(config=model.config), []
    with replayssm.enable(model, L, mode="auto"):
        so_far = ids
        for new, change in (
            (7, lambda: cache.batch_select_indices(torch.tensor([1]))),
            (8, lambda: cache.batch_repeat_interleave(2)),
            (6, lambda: cache.batch_select_indices(torch.tensor([True, False]))),
            (9, lambda: None),
        ):
            with ops.count_traffic() as traffic:
                so_far = tokens(model, so_far, new, cache)
            appends.append(traffic.totals().appends)
            change()
            rows = layers_of(cache)[0].checkpoint.shape[0]
            so_far = so_far[1:] if rows < len(so_far) else so_far.repeat_interleave(rows // len(so_far), 0)
    assert torch.equal(so_far, stock[1:])
    assert [n > 0 for n in appends] == [rows == replayed for rows in (2, 1, 2, 1)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_route_that_changes_at_any_step(family, seed, monkeypatch):
    """Each layer at each step takes either route, so that packed steps meet rings of every fill."""
    model, ids = model_of(family), prompt(2, 9)
    stock = greedy(model, ids, 40)
    draw = random.Random(seed)
    monkeypatch.setattr(ops, "decode_route", lambda *args: draw.choice(("packed", "replay", "replay")))
    with replayssm.enable(model, L, mode="auto"), ops.count_traffic() as traffic:
        assert_same(greedy(model, ids, 40), stock)
    totals = traffic.totals()
    assert totals.appends > 0
    assert totals.flushes > 3 * 2 * 39 // L  # the packed steps flush too


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_and_a_deep_copy(family, replayed):
    """A copy in mid-ring goes on with another batch size, and leaves the original alone."""
    model = model_of(family)
    with replayssm.enable(model, L, mode="auto"):
        first = greedy(model, prompt(1, 9), 12)
    cache = first[2].past_key_values
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(2)
    for past, rows, seed in ((cache, 1, 3), (copied, 2, 4)):
        for length in (1, 5):
            ids = torch.cat([first[0].expand(rows, -1), prompt(rows, length, seed=seed)], dim=1)
            options = dict(attention_mask=torch.ones_like(ids))
            stock = greedy(model, ids, 13, **options)
            with replayssm.enable(model, L, mode="auto"):
                assert_same(greedy(model, ids, 13, past_key_values=copy.deepcopy(past), **options), stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family, replayed):
    """Reordering sends a cache to packed decode whatever the batch size; `reset` gives it back to the policy."""
    model, ids = model_of(family), prompt(1, 9)
    args = dict(num_beams=2, max_new_tokens=24, do_sample=False)
    stock = model.generate(ids, **args)
    cache = ReplayCache(model.config, L)
    with replayssm.enable(model):
        assert torch.equal(model.generate(ids, past_key_values=cache, **args), stock)
        layer = layers_of(cache)[0]
        spec = linear_layers(model)[0].spec()
        assert layer.route(spec) == "packed"
        cache.layers[0].reset()
        layer.lazy_initialization(recurrent_states=torch.empty(2, spec.num_v_heads, 16, 16))
        assert layer.route(spec) == ("replay" if replayed == 2 else "packed")


def test_rows_may_be_permuted_in_mid_ring(replayed):
    model, ids = model_of("qwen3_next"), prompt(2, 9)
    stock = tokens(model, ids, 27)
    cache = ReplayCache(model.config, L)
    with replayssm.enable(model):
        first = tokens(model, ids, 7, cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(tokens(model, first[[1, 0]], 20, cache), stock[[1, 0]])


@pytest.fixture
def fresh_compiler():
    """Compiled code belongs to the class of a layer, so that other tests would meet it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_decode_step_compiles_on_either_route(monkeypatch):
    """As one graph: nothing on the host depends on what a tensor holds, when the route changes either."""
    route = "replay"
    monkeypatch.setattr(ops, "decode_route", lambda *args: route)
    model = copy.deepcopy(model_of("qwen3_5_text"))
    cache = ReplayCache(model.config, L)
    layer = linear_layers(model)[-1]
    with replayssm.enable(model), torch.no_grad():
        model(prompt(1, 9), past_key_values=cache)
        x = torch.randn(1, 1, model.config.hidden_size)
        expected_cache = copy.deepcopy(cache)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        for route in ("replay", "replay", "packed", "packed", "replay", "packed"):  # noqa: B007
            assert torch.equal(compiled(x, cache), layer(x, expected_cache))
    assert layers_of(cache)[-1].cursor.tolist() == [0]


def test_auto_is_the_default_and_on_a_cpu_it_replays():
    for function in (replayssm.enable, replayssm.patch, ReplayCache):
        assert inspect.signature(function).parameters["mode"].default == "auto"
    model, counted = model_of("kimi_linear"), []
    for options in ({}, {"mode": "replay"}):
        with replayssm.enable(model, **options), ops.count_traffic() as traffic:
            tokens(model, prompt(1, 5), 20)
        counted.append(traffic.totals())
    assert counted[0] == counted[1]
    assert counted[0].appends > 0
