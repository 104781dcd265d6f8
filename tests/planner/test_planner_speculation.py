"""Memory of drafts: what a plan says is what an engine allocates, and what the documentation says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from replayssm.errors import OptionError
from replayssm.planner.checkpoints import GEOMETRIES
from replayssm.planner.config import read_config
from replayssm.planner.estimate import Budget, Settings, request_bytes, spec_bytes
from replayssm.spec import SpecState, ring_for
from tests.engine import common
from tests.engine.test_speculation import with_head

STATES: tuple[SpecState, ...] = ("ring", "snapshot", "kv-replay", "fold")
CURSOR = 4
MIB = 2**20
MATHEMATICS = (Path(__file__).resolve().parents[2] / "docs" / "mathematics.md").read_text(encoding="utf-8")
ROWS = {
    names: [float(cell) for cell in cells.split(" | ")]
    for names, cells in re.findall(r"^\| ([A-Z][\w.-]+(?:, [\w.-]+)*) \| ([\d. |]+) \|$", MATHEMATICS, re.M)
}


def tensors_of(thing) -> int:
    """Bytes of all tensors that an object holds, in lists and dicts too, each storage once."""
    found: dict[int, int] = {}

    def look(value):
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            [look(one) for one in value.values()]
        elif isinstance(value, (list, tuple)):
            [look(one) for one in value]

    look(vars(thing))
    return sum(found.values())


@pytest.mark.parametrize(("drafts", "state_dtype"), [(1, "float32"), (4, "float16")])
@pytest.mark.parametrize("strategy", STATES)
@pytest.mark.parametrize("family", [common.SMALL, "kimi_linear"])
def test_a_plan_is_what_an_engine_allocates(family, strategy, drafts, state_dtype):
    geometry = read_config(common.loaded_of(family).config.to_dict(), family)
    options = dict(spec="ngram", spec_state=strategy, spec_tokens=drafts, ring_len=9, state_dtype=state_dtype)
    with common.engine_of(family, **options, max_requests=3, page_size=4) as engine:
        settings = Settings(9, state_dtype, "float32", "float32", context=engine.plan.page_size)
        held = spec_bytes(geometry, settings, strategy, drafts)
        slots, windows = engine.slots, engine.runner.windows
        buffers = windows.nbytes
        assert tensors_of(slots) == slots.nbytes
        if strategy == "kv-replay":  # parameters of the layers, once for all requests
            buffers += sum(x.nbytes for x in windows._gates)
        assert tensors_of(windows) == buffers
        assert slots.nbytes + windows.nbytes == 3 * (held.total - held.kv + CURSOR) == 3 * engine.plan.slot_bytes
        assert windows.nbytes == 3 * held.drafts == 3 * engine.plan.draft_bytes
        assert engine.plan.ring_bytes == held.ring
        assert engine.plan.conv_bytes == held.conv
        assert engine.plan.page_bytes == held.kv


def test_hidden_states_of_the_head_are_in_the_engines_plan(tmp_path):
    loaded = with_head(tmp_path)
    geometry = read_config(loaded.config.to_dict(), "tiny")
    with common.engine_of(loaded, spec="mtp", spec_tokens=3, ring_len=8) as engine:
        held = spec_bytes(geometry, Settings(8, "float32", "float32"), "ring", 3)
        hidden = engine.drafter.hidden
        assert engine.plan.draft_bytes - held.drafts == hidden.nbytes / hidden.shape[0] > 0


@pytest.mark.parametrize("name", ["Qwen3.5-122B-A10B", "Kimi-Linear-48B-A3B"])
def test_a_ring_holds_three_times_the_requests_of_snapshots(name):
    geometry, settings = GEOMETRIES[name], Settings(ring_len=ring_for(5))
    budget = Budget(2 * geometry.weight_bytes, geometry.weight_bytes)
    fit = {strategy: budget.requests(spec_bytes(geometry, settings, strategy, 4).total) for strategy in STATES}
    assert fit["snapshot"] > 30
    assert fit["ring"] >= 3 * fit["snapshot"]
    plain = budget.requests(request_bytes(geometry, settings, "packed").total)
    assert plain > fit["kv-replay"] > fit["fold"] > fit["ring"]


@pytest.mark.parametrize(("name", "context"), [("Qwen3.5-122B-A10B", 7600), ("Kimi-Linear-48B-A3B", 4800)])
def test_the_context_up_to_which_it_does(name, context):
    assert re.search(rf"\b{context}( tokens)?\s\({name}\)", MATHEMATICS)

    def times(tokens: int) -> float:
        settings = Settings(ring_len=16, context=tokens)
        snapshot, ring = (spec_bytes(GEOMETRIES[name], settings, state, 4).total for state in ("snapshot", "ring"))
        return snapshot / ring

    assert times(context) >= 3 > times(context + 100)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_table_of_all_checkpoints(name):
    found = [row for names, row in ROWS.items() if name in names.split(", ")]
    assert len(found) == 1
    held = {state: spec_bytes(GEOMETRIES[name], Settings(ring_len=16), state, 4) for state in STATES}
    own = {state: one.total - one.kv for state, one in held.items()}
    want = [own[state] / MIB for state in STATES] + [held["ring"].kv / MIB]
    assert found[0][:5] == pytest.approx(want, abs=0.051)
    ratios = [held["snapshot"].total / held["ring"].total, own["snapshot"] / own["ring"]]
    assert found[0][5:] == pytest.approx(ratios, abs=0.0051)


def test_states_and_windows_are_counted_as_they_are():
    geometry, settings = GEOMETRIES["Qwen3.5-9B"], Settings(ring_len=7)
    plain = request_bytes(geometry, settings, "packed")
    found = {state: spec_bytes(geometry, settings, state, 4) for state in STATES}
    x = 24 * 5 * geometry.spec.qkv_dim * 2
    for held in found.values():
        assert (held.state, held.conv, held.kv) == (plain.state, plain.conv, plain.kv)
    assert found["snapshot"].drafts == 5 * geometry.state_bytes + x
    assert found["ring"].drafts == found["fold"].drafts == x
    assert found["ring"].ring == request_bytes(geometry, settings, "replay").ring
    assert found["fold"].ring * 7 == found["ring"].ring * 5
    assert found["kv-replay"].ring == found["snapshot"].ring == 0
    assert found["kv-replay"].drafts == 2 * x + 24 * 5 * 2 * 32 * 2


def test_windows_that_do_not_fit_are_refused():
    geometry = GEOMETRIES["Qwen3.5-9B"]
    with pytest.raises(OptionError, match=r"window of 5 tokens, .* ring of 5; use ring_len 6 or more, .* up to 3"):
        spec_bytes(geometry, Settings(ring_len=5), "ring", 4)
    assert spec_bytes(geometry, Settings(ring_len=5), "fold", 4).ring
    with pytest.raises(OptionError, match=r"spec_tokens 63 .* use 1…62"):
        spec_bytes(geometry, Settings(), "snapshot", 63)


def test_a_ring_that_is_chosen_holds_three_windows_where_it_can():
    assert ring_for(5) == 16
    for tokens in range(2, 64):
        chosen = ring_for(tokens)
        assert tokens < chosen <= 64
        assert chosen >= min(64, 3 * tokens)
        assert chosen == 8 or chosen < 6 * tokens
