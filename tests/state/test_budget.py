"""The split of memory: never too much, never less than would fit, and true to what the pools allocate."""

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from replayssm.errors import MemoryBudgetError, OptionError
from replayssm.state import PagePool, SlotPool, TokenArray, plan_memory
from replayssm.state.budget import EXPECTED_TOKENS
from tests.decode_case import layer

GIB = 2**30
PLANS = dict(
    budget=st.integers(0, 4000), weights=st.integers(0, 300), work=st.integers(0, 300), slot=st.integers(1, 200),
    page=st.integers(0, 40), page_size=st.sampled_from([1, 4, 16, 64]), context=st.integers(2, 5000),
    most=st.integers(1, 40), requests=st.none() | st.integers(1, 40),
    share=st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9]), ring=st.integers(0, 50),
)  # fmt: skip


def plan_of(budget, weights, work, slot, page, page_size, context, most, requests=None, share=0.0, ring=0):
    """`slot` is what a state takes, `ring` what a running request's takes besides."""
    return plan_memory(
        budget, weights, work, slot + ring, ring, 0, page, page_size, context, most, requests, share, slot
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(**PLANS)
@example(1000, 0, 0, 100, 0, 4, 50, 3, None, 0.0, 0)  # no attention layer
@example(103, 0, 0, 100, 1, 4, 50, 3, None, 0.0, 0)  # one slot, one page, nothing left
def test_all_that_fits_is_used_and_no_more(
    budget, weights, work, slot, page, page_size, context, most, requests, share, ring
):
    args = (budget, weights, work, slot, page, page_size, context, most, requests, share, ring)
    whole = slot + ring
    rest = budget - weights - work
    spare = rest - whole - 3 * page  # what the prefix cache may take its share of
    try:
        plan = plan_of(*args)
    except MemoryBudgetError:
        kept = int(max(0, spare) * share) // slot * slot
        assert rest - kept < (requests or 1) * whole + 3 * page or (requests or 0) > most
        return
    assert plan.used <= plan.budget == budget
    assert rest >= (requests or 1) * whole + 3 * page
    assert sum(size for _, size in plan.split()) == budget
    assert all(size >= 0 for _, size in plan.split())
    full = plan.slots * -(-context // page_size)  # pages that the slots can fill
    unused = budget - plan.used
    assert 1 <= plan.slots <= most
    assert 1 <= plan.pages <= full
    assert plan.tokens == plan.pages * page_size
    assert unused < page or plan.pages == full
    assert plan.reserved_slots == int(spare * share) // slot
    if requests is not None:
        assert plan.slots == requests
    elif plan.slots < most:  # another slot would leave less than the expected tokens for each
        expected = -(-min(context, EXPECTED_TOKENS) // page_size)
        assert unused + plan.pages * page < whole + (plan.slots + 1) * expected * page


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**PLANS, more=st.integers(1, 500))
def test_more_memory_never_holds_less(
    budget, weights, work, slot, page, page_size, context, most, requests, share, ring, more
):
    args = (weights, work, slot, page, page_size, context, most, requests, 0.0, ring)
    try:
        plan = plan_of(budget, *args)
    except MemoryBudgetError:
        assume(False)
    larger = plan_of(budget + more, *args)
    assert larger.slots >= plan.slots
    assert larger.pages >= plan.pages or larger.slots > plan.slots


def test_what_is_too_small_is_said_in_numbers():
    with pytest.raises(MemoryBudgetError, match=r"memory of 4 GiB does not hold weights of 3 GiB and 1\.75 GiB"):
        plan_of(4 * GIB, 3 * GIB, GIB, GIB // 2, GIB // 12, 16, 4096, 8)
    with pytest.raises(MemoryBudgetError, match=r"memory of 8 GiB does not hold weights of 3 GiB and 5\.5 GiB"):
        plan_of(8 * GIB, 3 * GIB, GIB, GIB, GIB // 6, 16, 4096, 8, requests=4)
    assert plan_of(8 * GIB, 3 * GIB, GIB, GIB, GIB // 6, 16, 4096, 8, requests=3).slots == 3
    for share in (-0.1, 1.0):
        with pytest.raises(OptionError, match=r"outside \[0, 1\)"):
            plan_of(8 * GIB, GIB, 0, GIB, GIB, 16, 4096, 8, share=share)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("ring", [None, 1, 8])
@pytest.mark.parametrize(("state", "io"), [("float32", "float32"), ("float16", "bfloat16")])
def test_the_plan_is_what_the_pools_take(kind, ring, state, io):
    specs = [layer(kind, (2, 4 if kind == "gdn" else 2, 8, 6)).spec] * 3
    one = TokenArray(2, 5, torch.bfloat16)
    arrays = [[one, one], [TokenArray(1, 3, torch.float32), one]]
    slot, page = SlotPool.slot_bytes(specs, ring, state, io), PagePool.page_bytes(arrays, 4)
    plan = plan_memory(50_000 + 7 * slot, 0, 0, slot, 0, 0, page, 4, 100, 7)
    slots = SlotPool(specs, plan.slots, ring, state, io)
    pages = PagePool(arrays, plan.pages, plan.page_size)
    assert plan.slots > 1
    assert slots.nbytes == plan.slots * slot
    assert pages.nbytes == (plan.pages + 2) * page
    assert slots.nbytes + pages.nbytes == plan.used <= plan.budget
