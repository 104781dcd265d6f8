"""Verify on a ring, against the fp64 reference and the serial recurrence, token by token."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from replayssm import ops
from tests import tolerance
from tests.decode_case import KINDS, Pool, int32, layer
from tests.step_case import filled_pool, same
from tests.verify_case import Run, empty_out, inputs, limits, step, verify

SLOTS = int32(4, 1, 2, 7)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])


def some_slots(count, seed=1):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [1, 2, 8, 16, 32])
def test_every_cursor_and_length(kind, ring_len):
    """Rows of 0 to T tokens side by side at every cursor, a full ring too, with and without forced flush."""
    lay = layer(kind, (1, 2, 6, 5), ring_len)
    for tokens in {1, min(4, ring_len), ring_len} if ring_len < 32 else {5}:
        cursors = range(ring_len + 1) if ring_len < 32 else (0, 1, 26, 27, 28, 31, 32)
        cases = list(itertools.product(cursors, range(tokens + 1), (0, 5)))
        if len(cases) > 120:
            cases = random.Random(tokens).sample(cases, 120)
        n, lengths, force = (int32(*column) for column in zip(*cases, strict=True))
        step(lay, some_slots(len(cases)), n, lengths, tokens, force)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_each_window_against_the_serial_recurrence_for_each_acceptance(kind, tokens):
    """A row for every cursor of a ring of 8; then plain decode reads what was left of the window."""
    lay = layer(kind, (1, 2, 6, 5), ring_len=8)
    for accepted in range(tokens + 1):
        run = Run(lay, some_slots(8), 26)
        for row in range(8):  # row r has r records
            run.done[row] = row
        for t in range(7):
            behind = [row for row in range(8) if row > t]
            token = tuple(x[t, behind] for x in run.stream[:])
            run.outs[t, behind] = run.pool.step(token, run.slots[behind]).double()
        assert run.pool.cursor[run.slots.long()].tolist() == list(range(8))
        run.verify(tokens, [tokens] * 8, [accepted] * 8)
        if tokens < 8:
            for _ in range(9):
                run.decode()
        run.check(tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [2, 5, 16])
def test_windows_and_plain_steps_take_turns(kind, ring_len):
    """Rows with and without drafts, random acceptance, forced flushes: what was rejected leaves no trace."""
    lay, rng = layer(kind, ring_len=ring_len), random.Random(ring_len)
    run, tokens = Run(lay, SLOTS, 60), min(4, ring_len - 1)
    while any(map(run.left, range(4))):
        if rng.random() < 0.3:
            run.decode()
            continue
        lengths = [rng.choice((0, 1, tokens, rng.randint(0, tokens))) for _ in SLOTS]
        accepted = [rng.choice((0, m, rng.randint(0, m))) for m in lengths]
        run.verify(tokens, lengths, accepted, int32(*(int(rng.random() < 0.1) for _ in SLOTS)))
        assert int(run.pool.cursor.max()) < ring_len, "plain decode could not go on"
    run.check(tokens)


@KIND
def test_whole_rings_verified_one_after_the_other(kind):
    """T = L: what is kept whole leaves a full ring, which the next window folds."""
    run = Run(layer(kind, ring_len=4), SLOTS, 16)
    for t in range(4):
        run.verify(4, [4] * 4, [4, 4, 4, 4 - t])
        assert run.pool.cursor[4] == 4
    run.check(4)


@KIND
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("io", DTYPES)
def test_dtypes(kind, io, state_dtype):
    lay = layer(kind, ring_len=5, io=io, state_dtype=state_dtype)
    step(lay, int32(3, 0, 5, 1), int32(0, 2, 4, 3), int32(3, 2, 3, 1), 3)


@KIND
@pytest.mark.parametrize(
    "dims",
    [(1, 1, 1, 1), (2, 4, 16, 32), (3, 3, 33, 7), (5, 5, 96, 24), (1, 3, 256, 3), (1, 1, 5, 250), (2, 8, 64, 64)],
)
def test_head_counts_and_dims(kind, dims):
    step(layer(kind, dims, ring_len=6), int32(2, 0, 1), int32(2, 3, 5), int32(4, 3, 1), 4)


@KIND
def test_without_the_norm(kind):
    lay = layer(kind, l2norm=False)
    window = inputs(lay, 3, 4)
    window[0].mul_(0.2)  # keeps β|k|² below 2, where the recurrence is stable
    pool = filled_pool(lay, int32(2, 0, 1), int32(3, 6, 0), 4)
    pool.k_cache.mul_(0.2)
    step(lay, int32(2, 0, 1), int32(3, 6, 0), int32(4, 4, 4), 4, pool=pool, window=window)


@KIND
@pytest.mark.parametrize("repeated", [False, True])
def test_a_window_of_one_key_repeated_and_betas_at_their_limits(kind, repeated):
    """Each token then undoes what the one before did: the triangular system is as far from diagonal as it gets."""
    lay = layer(kind + "-beta2" * (kind == "gdn"), ring_len=8)
    window = inputs(lay, 4, 7)
    if repeated:
        window[0][:] = window[0][:, :1]
    window[2][:2], window[2][2:] = 40.0, -40.0
    step(lay, SLOTS, int32(0, 1, 3, 7), int32(7, 7, 7, 7), 7, window=window)


@KIND
def test_a_window_of_one_token_is_a_plain_step(kind):
    lay, slots, cursors = layer(kind), int32(3, 0, 2), int32(0, 6, 3)
    pool = filled_pool(lay, slots, cursors, 5)
    other, window = pool.on("cpu"), inputs(lay, 3, 1)
    out = verify(lay, pool, window, slots, cursors, int32(1, 1, 1))
    want = other.step(tuple(x[:, 0] for x in window), slots)
    tolerance.assert_close(out[:, 0], want, tolerance.output(12, 8), "output")
    for new, old in zip(pool.tensors, other.tensors, strict=True):
        tolerance.assert_close(new[slots.long()].nan_to_num(), old[slots.long()].nan_to_num(), tolerance.state(12, 8))


@KIND
def test_named_entry_points_and_scale(kind):
    lay, slots = layer(kind), int32(3, 0)
    pool, window = filled_pool(lay, slots, int32(2, 7), 5), inputs(lay, 2, 3)
    again, out = pool.on("cpu"), empty_out(lay, 2, 3)
    want = verify(lay, pool, window, slots, int32(2, 7), int32(3, 2))
    named = {"gdn": ops.gdn_verify, "kda": ops.kda_verify}[kind]
    got = named(
        *window, lay.A_log, lay.dt_bias, 12**-0.5, *again.tensors, out, slots, int32(2, 7), int32(3, 2)
    )  # fmt: skip
    assert torch.equal(got, want)
    assert all(same(a, b) for a, b in zip(pool.tensors, again.tensors, strict=True))


@KIND
def test_output_may_be_wider_than_the_activations(kind):
    lay, slots = layer(kind, io=torch.bfloat16), int32(2, 0)
    pool, window = filled_pool(lay, slots, int32(3, 7), 4), inputs(lay, 2, 3)
    out = torch.empty(2, 3, 6, 20)
    verify(lay, pool.on("cpu"), window, slots, int32(3, 7), int32(3, 3), out=out)
    narrow = verify(lay, pool, window, slots, int32(3, 7), int32(3, 3))
    tolerance.assert_close(narrow, out, tolerance.rounding(torch.bfloat16) + limits(lay, 3)[1], "bf16")
    assert out.dtype == torch.float32


@KIND
def test_empty_batch_and_rows_without_tokens(kind):
    lay = layer(kind)
    assert verify(lay, Pool(lay, 3), inputs(lay, 0, 4), int32(), int32(), int32()).shape == (0, 4, 6, 20)
    slots, cursors = int32(1, 0), int32(7, 3)
    out, _ = step(lay, slots, cursors, int32(0, 0), 4)
    assert not out.any()


@KIND
def test_first_call_equals_second_on_the_restored_pool(kind):
    lay, slots, cursors, lengths = layer(kind), int32(3, 0, 2), int32(2, 6, 0), int32(4, 4, 4)
    pool, window = filled_pool(lay, slots, cursors, 5), inputs(lay, 3, 4)
    again = pool.on("cpu")
    assert torch.equal(*(verify(lay, p, window, slots, cursors, lengths) for p in (pool, again)))
    assert all(same(a, b) for a, b in zip(pool.tensors, again.tensors, strict=True))
