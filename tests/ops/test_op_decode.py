"""Decode against the fp64 serial recurrence: outputs of every step and the state after a flush."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from tests import tolerance
from tests.decode_case import KINDS, Pool, int32, layer

SLOTS = int32(4, 1, 2, 7)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_run(lay, slots=SLOTS, steps=None, force=None, pool=None, state=None, tokens=None):
    """Run, compare every output with the oracle, then the flushed state."""
    steps = steps or 2 * lay.ring_len + 3
    pool = pool or Pool(lay, 9)
    state = lay.state(len(slots)) if state is None else state
    tokens = tokens or lay.tokens(steps, len(slots))
    pool.place(slots, state)
    out = pool.run(tokens, slots, force)
    want_out, want_state = lay.serial(state, tokens)
    k = lay.spec.head_k_dim
    tolerance.assert_close(out, want_out, tolerance.output(k, lay.ring_len, lay.io), "output")
    tolerance.assert_close(pool.flushed(slots), want_state, tolerance.state(k, lay.ring_len), "state")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [1, 2, 8, 16, 32])
def test_kinds_and_ring_lengths(kind, ring_len):
    check_run(layer(kind, ring_len=ring_len))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize(
    "dims", [(1, 1, 1, 1), (1, 5, 33, 7), (3, 3, 16, 80), (5, 5, 96, 24), (2, 4, 256, 3), (1, 2, 5, 256)]
)
def test_head_counts_and_dims(kind, dims):
    check_run(layer(kind, dims, ring_len=4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [SLOTS, int32(2, 3, 4, 5)])
def test_random_forced_flushes_stagger_the_rows(kind, slots):
    lay, steps = layer(kind, ring_len=5), 40
    force = (torch.rand(steps, len(slots), generator=torch.Generator().manual_seed(3)) < 0.2).int()
    check_run(lay, slots, steps=steps, force=force)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("slots", [int32(3, 4, 5, 6), int32(0, 1, 2, 3), int32(8, 7, 6, 5), int32(2, 3, 7, 8)])
def test_consecutive_reversed_and_split_slots(kind, slots):
    check_run(layer(kind), slots=slots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [1, 2, 8])
def test_every_cursor_with_and_without_forced_flush(kind, ring_len):
    """One batch holds all pairs (cursor, force); then one more step reads what the first one left."""
    lay = layer(kind, ring_len=ring_len)
    cursors = [p for p in range(ring_len) for _ in (0, 1)]
    rows = len(cursors)
    pool, state, slots = Pool(lay, rows), lay.state(rows), torch.arange(rows, dtype=torch.int32)
    pool.place(slots, state)
    tokens = lay.tokens(ring_len + 1, rows)
    histories = []
    for row, cursor in enumerate(cursors):
        for t in range(cursor):
            pool.step(tokens[t, row : row + 1], slots[row : row + 1])
        histories.append(torch.cat([torch.arange(cursor), torch.tensor([ring_len - 1, ring_len])]))
    assert pool.cursor.tolist() == cursors
    force = int32(*[row % 2 * 5 for row in range(rows)])  # any value but 0 counts
    outs = [pool.step(tokens[ring_len - 1], slots, force), pool.step(tokens[ring_len], slots)]
    states = pool.flushed(slots)
    for row in range(rows):
        part = type(tokens)(*(x[histories[row], row : row + 1] for x in tokens[:]))
        want, want_state = lay.serial(state[row : row + 1], part)
        for got, at in zip(outs, (-2, -1), strict=True):
            tolerance.assert_close(got[row], want[at, 0], tolerance.output(lay.spec.head_k_dim, ring_len), f"row {row}")
        tolerance.assert_close(states[row], want_state[0], tolerance.state(lay.spec.head_k_dim, ring_len), f"row {row}")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_dtypes(kind, io, state_dtype):
    """One ring period from an exact state: one store, at the flush that ends it."""
    lay = layer(kind, ring_len=8, io=io, state_dtype=state_dtype)
    pool, state, tokens = Pool(lay, 9), lay.state(4), lay.tokens(8, 4)
    pool.place(SLOTS, state)
    out = pool.run(tokens, SLOTS)
    want_out, want_state = lay.serial(state, tokens)
    k = lay.spec.head_k_dim
    tolerance.assert_close(out, want_out, tolerance.output(k, 8, io), "output")
    tolerance.assert_close(pool.initial_state[SLOTS.long()], want_state, tolerance.state(k, 8, state_dtype), "state")


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dims", [(2, 6, 12, 20), (3, 3, 32, 17)])
def test_packed(kind, dims):
    lay, steps = layer(kind, dims), 20
    pool, state, tokens = Pool(lay, 9), lay.state(4), lay.tokens(steps, 4)
    pool.place(SLOTS, state)
    out = torch.stack([pool.packed_step(tokens[t], SLOTS) for t in range(steps)])
    want_out, want_state = lay.serial(state, tokens)
    tolerance.assert_close(out, want_out, tolerance.output(dims[2], 1), "output")
    tolerance.assert_close(pool.initial_state[SLOTS.long()], want_state, tolerance.state(dims[2], 1), "state")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_ring_of_one_is_packed_decode_to_the_bit(kind, state_dtype):
    lay = layer(kind, ring_len=1, state_dtype=state_dtype)
    replay, packed, tokens = Pool(lay, 9), Pool(lay, 9), lay.tokens(6, 4)
    for pool in (replay, packed):
        pool.place(SLOTS, lay.state(4))
    for t in range(6):
        assert torch.equal(replay.step(tokens[t], SLOTS), packed.packed_step(tokens[t], SLOTS))
    assert torch.equal(replay.initial_state.nan_to_num(9), packed.initial_state.nan_to_num(9))


def test_flush_forced_on_every_step_is_packed_decode_to_the_bit():
    lay = layer("kda")
    replay, packed, tokens = Pool(lay, 9), Pool(lay, 9), lay.tokens(6, 4)
    for pool in (replay, packed):
        pool.place(SLOTS, lay.state(4))
    for t in range(6):
        assert torch.equal(replay.step(tokens[t], SLOTS, int32(1, 1, 1, 1)), packed.packed_step(tokens[t], SLOTS))
    assert torch.equal(replay.initial_state.nan_to_num(9), packed.initial_state.nan_to_num(9))


def test_value_heads_are_grouped_by_key_head():
    """Key head 1 is zero and nothing decays: the value heads of key head 1 keep their state, the others change."""
    lay = layer("gdn", (2, 4, 6, 3), ring_len=2)
    lay.A_log.fill_(-float("inf"))
    tokens = lay.tokens(2, 1)
    tokens.mixed_qkv[..., 3 * 6 : 4 * 6] = 0
    pool, state = Pool(lay, 1), lay.state(1)
    pool.place(int32(0), state)
    pool.run(tokens, int32(0))
    kept = [torch.equal(pool.initial_state[0, hv], state[0, hv]) for hv in range(4)]
    assert kept == [False, False, True, True]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_without_l2norm(kind):
    lay = layer(kind, l2norm=False)
    tokens = lay.tokens(19, 4)
    tokens.mixed_qkv.mul_(0.2)  # keeps β|k|² below 2, where the recurrence is stable
    check_run(lay, tokens=tokens)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("factor", [100.0, 1e-3, 0.0])
def test_large_small_and_zero_keys(kind, factor):
    lay = layer(kind)
    tokens = lay.tokens(19, 4)
    s = lay.spec
    tokens.mixed_qkv[..., : 2 * s.num_k_heads * s.head_k_dim].mul_(factor)
    check = Pool(lay, 9)
    check.place(SLOTS, lay.state(4))
    out = check.run(tokens, SLOTS)
    want, want_state = lay.serial(lay.state(4), tokens)
    if factor == 0:
        assert torch.equal(out, torch.zeros_like(out))
    else:
        tolerance.assert_close(out, want, tolerance.output(s.head_k_dim, 8), "output")
    tolerance.assert_close(check.flushed(SLOTS), want_state, tolerance.state(s.head_k_dim, 8), "state")


def test_output_may_be_wider_than_the_activations():
    lay = layer("gdn", io=torch.bfloat16)
    pool, tokens, state = Pool(lay, 9), lay.tokens(1, 4), lay.state(4)
    pool.place(SLOTS, state)
    out = pool.step(tokens[0], SLOTS, out=lay.empty_out(4, torch.float32))
    tolerance.assert_close(out, lay.serial(state, tokens)[0][0], tolerance.output(12, 8), "fp32 output")


def test_scale_none_is_the_root_of_k_and_named_entry_points_agree():
    for kind, replay, packed in (
        ("gdn", ops.gdn_decode, ops.gdn_packed_decode),
        ("kda", ops.kda_decode, ops.kda_packed_decode),
    ):
        lay = layer(kind)
        pool, tokens = Pool(lay, 9, 0.0), lay.tokens(1, 4)
        pool.place(SLOTS, lay.state(4))
        pos, out, again = int32(0, 0, 0, 0), lay.empty_out(4), lay.empty_out(4)
        args = (*tokens[0], lay.A_log, lay.dt_bias)
        replay(*args, 12**-0.5, *pool.tensors, out, SLOTS, pos)
        packed(*args, None, pool.initial_state, again, SLOTS)
        tolerance.assert_close(again, out, tolerance.output(12, 8), kind)


def test_rounded_gate_parameters_are_widened_first():
    """A bf16 A_log gives the decay of its fp32 value, not exp() evaluated in bf16."""
    lay = layer("gdn")
    lay.A_log = torch.full((6,), 2.77).bfloat16()
    lay.dt_bias = lay.dt_bias.bfloat16()
    check_run(lay)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_empty_batch(kind):
    lay = layer(kind)
    pool, tokens = Pool(lay, 3), lay.tokens(1, 0)
    assert pool.step(tokens[0], int32()).shape == (0, 6, 20)
    assert pool.packed_step(tokens[0], int32()).shape == (0, 6, 20)


def test_more_rows_times_heads_than_a_16_bit_grid_axis():
    lay, rows = layer("gdn", (32, 32, 4, 3), ring_len=2), 2049
    tokens, slots = lay.tokens(3, rows), torch.arange(rows, dtype=torch.int32)
    whole, halves = Pool(lay, rows), Pool(lay, rows)
    for pool in (whole, halves):
        pool.place(slots, lay.state(rows))
    out = whole.run(tokens, slots)
    cut = 1024
    parts = [halves.run(type(tokens)(*(x[:, s] for x in tokens[:])), slots[s]) for s in (slice(cut), slice(cut, None))]
    tolerance.assert_close(torch.cat(parts, 1), out, tolerance.output(4, 2), "halves")


def test_first_call_equals_second_on_the_restored_pool():
    lay = layer("kda")
    pool, tokens = Pool(lay, 9), lay.tokens(1, 4)
    pool.place(SLOTS, lay.state(4))
    saved = [t.clone() for t in pool.tensors]
    first = pool.step(tokens[0], SLOTS)
    for tensor, old in zip(pool.tensors, saved, strict=True):
        tensor.copy_(old)
    pool.cursor.zero_()
    assert torch.equal(pool.step(tokens[0], SLOTS), first)
