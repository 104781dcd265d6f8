"""Flush, materialize and the cursor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import ops, reference
from tests import tolerance
from tests.decode_case import Pool, int32, layer
from tests.ops.test_op_isolation import same

KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])


def layered_pools(kind, layers=3, slots=6, state_dtype=torch.float32):
    """Pools [layers, slots, …] after staggered decodes, their cursors, and the true states [layers, slots, …]."""
    lay = layer(kind, ring_len=4, state_dtype=state_dtype)
    cursors = [0, 1, 3, 2, 3, 0]
    pools, truth = [], []
    for i in range(layers):
        pool, state, tokens = Pool(lay, slots), lay.state(slots, seed=i), lay.tokens(8, slots, seed=10 + i)
        pool.place(torch.arange(slots), state)
        for t in range(8):
            todo = torch.tensor([s for s in range(slots) if t < cursors[s] + 4], dtype=torch.int32)
            pool.step(type(tokens)(*(x[:, todo.long()] for x in tokens[:]))[t], todo)
        parts = [type(tokens)(*(x[: cursors[s] + 4, s : s + 1] for x in tokens[:])) for s in range(slots)]
        truth.append(torch.cat([lay.serial(state[s : s + 1], parts[s])[1] for s in range(slots)]))
        assert pool.cursor.tolist() == cursors
        pools.append(pool)
    stacked = [torch.stack([p.tensors[i] for p in pools]) for i in range(4)]
    return stacked, pools[0].cursor, torch.stack(truth)


@KIND
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_flush_of_all_layers_at_once(kind, state_dtype):
    pools, cursor, truth = layered_pools(kind, state_dtype=state_dtype)
    before = [p.clone() for p in pools]
    slots = int32(4, -1, 1, 2, 0)
    ops.flush(*pools, slots, ops.gather_cursors(cursor, slots))
    flushed, rest = [4, 1, 2, 0], [3, 5]
    limit = tolerance.state(12, 4, state_dtype, stores=2)
    tolerance.assert_close(pools[0][:, flushed], truth[:, flushed], limit, "flushed")
    assert same([pools[0][:, rest]], [before[0][:, rest]])
    assert same([pools[0][:, 0]], [before[0][:, 0]]), "an empty ring must leave the checkpoint as it is"
    assert same(pools[1:], before[1:]), "the ring is not written"


@KIND
def test_flush_layer_by_layer_is_the_same(kind):
    pools, cursor, _ = layered_pools(kind)
    single, slots = [p.clone() for p in pools], int32(2, 3, 4)
    ops.flush(*pools, slots, ops.gather_cursors(cursor, slots))
    for i in range(3):
        ops.flush(*(p[i] for p in single), slots, ops.gather_cursors(cursor, slots))
    assert same(pools, single)


@KIND
@pytest.mark.parametrize("same_pool", [True, False])
def test_materialize_leaves_the_source(kind, same_pool):
    pools, cursor, truth = layered_pools(kind)
    before = [p.clone() for p in pools]
    dst = pools[0] if same_pool else torch.full((3, 9, *pools[0].shape[2:]), float("nan"))
    src, to = int32(4, 2, -1, 3, 1), int32(1, 0, 5, -1, 5) if same_pool else int32(7, 0, 5, -1, 3)
    if same_pool:
        src[4] = -1
    ops.materialize(*pools, src, ops.gather_cursors(cursor, src), dst, to)
    for s, d in zip(src.tolist(), to.tolist(), strict=True):
        if s >= 0 and d >= 0:
            tolerance.assert_close(dst[:, d], truth[:, s], tolerance.state(12, 4), f"{s} to {d}")
    sources = [s for s in src.tolist() if s >= 0]
    assert same([p[:, sources] for p in pools], [p[:, sources] for p in before])
    assert same(pools[1:], before[1:])
    skipped = [2, 3, 4, 5] if same_pool else [1, 2, 4, 5, 6, 8]
    old = before[0] if same_pool else torch.full_like(dst, float("nan"))
    assert same([dst[:, skipped]], [old[:, skipped]])


@KIND
def test_materialize_then_flush_agree_to_the_bit_and_an_empty_ring_is_a_copy(kind):
    pools, cursor, _ = layered_pools(kind)
    slots = torch.arange(6, dtype=torch.int32)
    copy = torch.zeros_like(pools[0])
    ops.materialize(*pools, slots, ops.gather_cursors(cursor, slots), copy, slots)
    assert torch.equal(copy[:, 0], pools[0][:, 0])
    ops.flush(*pools, slots, ops.gather_cursors(cursor, slots))
    tolerance.assert_close(copy, pools[0], tolerance.state(12, 4), "copy")


@KIND
def test_a_copy_of_a_pending_slot_continues_like_the_original(kind):
    """Donate at an unaligned length, then go on from the copy in a slot with cursor 0."""
    lay = layer(kind, ring_len=8)
    pool, state, tokens = Pool(lay, 4), lay.state(1), lay.tokens(19, 1)
    pool.place(int32(2), state)
    pool.run(type(tokens)(*(x[:13] for x in tokens[:])), int32(2))
    assert pool.cursor.tolist() == [0, 0, 5, 0]
    ops.materialize(*pool.tensors, int32(2), int32(5), pool.initial_state, int32(0))
    rest = type(tokens)(*(x[13:] for x in tokens[:]))
    want, _ = lay.serial(state, tokens)
    for slot in (0, 2):
        tolerance.assert_close(pool.run(rest, int32(slot)), want[13:], tolerance.output(12, 8), f"slot {slot}")


@pytest.mark.parametrize("packed_first", [False, True])
def test_a_reused_slot_equals_a_new_one(packed_first):
    lay = layer("kda", ring_len=4)
    used, new, tokens = Pool(lay, 2), Pool(lay, 2), lay.tokens(9, 1)
    used.place(int32(1), lay.state(1, seed=8))
    used.run(lay.tokens(3, 1, seed=5), int32(1))
    assert used.cursor[1] == 3
    used.cursor[1] = 0
    for pool in (used, new):
        pool.place(int32(1), lay.state(1))
    assert torch.equal(used.run(tokens, int32(1)), new.run(tokens, int32(1)))


def test_cursor_moves_once_a_forward_whatever_the_number_of_layers():
    lay, slots = layer("gdn", ring_len=16), int32(0, 2)
    cursor = torch.zeros(3, dtype=torch.int32)
    pools, tokens = [Pool(lay, 3, 0.0) for _ in range(3)], lay.tokens(1, 2)
    for _ in range(40):
        pos = ops.gather_cursors(cursor, slots)
        for pool in pools:
            ops.gdn_decode(*tokens[0], lay.A_log, lay.dt_bias, None, *pool.tensors, lay.empty_out(2), slots, pos)
        ops.advance_cursors(cursor, slots, 16)
    assert cursor.tolist() == [40 % 16, 0, 40 % 16]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 64), st.integers(0, 7), st.booleans(), st.booleans())
def test_advance_and_gather(data, ring_len, rows, with_force, with_counts):
    cursors = data.draw(st.lists(st.integers(0, ring_len - 1), min_size=7, max_size=7))
    slots = data.draw(st.permutations(range(7)))[:rows]
    slots = [-1 if data.draw(st.booleans()) else s for s in slots]
    force = [data.draw(st.integers(0, 2)) for _ in slots] if with_force else None
    counts = [data.draw(st.integers(0, ring_len + 2)) for _ in slots] if with_counts else None
    want = list(cursors)
    for i, slot in enumerate(slots):
        if slot >= 0:
            forced, n = bool(force and force[i]), counts[i] if counts else 1
            want[slot] = reference.advance_cursor(cursors[slot], ring_len, forced, n)
    cursor, index = int32(*cursors), int32(*slots)
    assert ops.gather_cursors(cursor, index).tolist() == [cursors[s] if s >= 0 else 0 for s in slots]
    ops.advance_cursors(
        cursor, index, ring_len, None if force is None else int32(*force), None if counts is None else int32(*counts)
    )
    assert cursor.tolist() == want


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(-2, 20), st.integers(0, 7), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_force_flush_mask(data, interval, rows, with_slots, dtype):
    lens = [data.draw(st.integers(-3, 60)) for _ in range(rows)]
    slots = [data.draw(st.integers(-2, 9)) for _ in range(rows)] if with_slots else None
    want = [int(reference.force_flush(n, interval, slots[i] if slots else 0)) for i, n in enumerate(lens)]
    index, out = None if slots is None else int32(*slots), torch.full((rows,), 7, dtype=torch.int32)
    assert ops.force_flush_mask(torch.tensor(lens, dtype=dtype), interval, index, out) is out
    assert out.tolist() == want
    fresh = ops.force_flush_mask(torch.tensor(lens, dtype=dtype), interval, index)
    assert fresh.dtype == torch.int32
    assert torch.equal(fresh, out)


def test_rows_flush_exactly_where_snapshots_are_due():
    """Three requests of different lengths, interval 6, ring of 16: a state that is due lies in the checkpoint."""
    lay, slots = layer("kda", ring_len=16), int32(2, 0, 1)
    pool, state, tokens, lens = Pool(lay, 3), lay.state(3), lay.tokens(20, 3), torch.tensor([5, 0, 9])
    pool.place(slots, state)
    due = 0
    for t in range(20):
        lens += 1
        force = ops.force_flush_mask(lens, 6, slots)
        pool.step(tokens[t], slots, force)
        for row in (lens % 6 == 0).nonzero().flatten().tolist():
            past = type(tokens)(*(x[: t + 1, row : row + 1] for x in tokens[:]))
            want = lay.serial(state[row : row + 1], past)[1][0]
            limit = tolerance.state(lay.spec.head_k_dim, 16)
            tolerance.assert_close(pool.initial_state[slots[row]], want, limit, f"row {row}, token {t}")
            assert pool.cursor[slots[row]] == 0
            due += 1
    assert due == 10
