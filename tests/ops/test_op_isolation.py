"""What a row does not own never reaches it, and it reaches nothing else: poison, canaries, padding, strides."""

from __future__ import annotations

import pytest
import torch

from tests import tolerance
from tests.decode_case import NAN, Pool, int32, layer

KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])
PADDED = {
    "first": int32(-1, 5, 2),
    "last": int32(5, 2, -1),
    "middle": int32(5, -1, 0, -1),
    "run": int32(-1, 3, 4, -1),
    "all": int32(-1, -1),
}


def bits(x):
    """Comparable bits: NaN equals the same NaN."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(a, b):
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@KIND
@pytest.mark.parametrize("poison", [NAN, 1e30])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_poison_changes_no_bit(kind, poison, state_dtype):
    """Free slots, dead records, the old output and the memory around the inputs hold poison, or zeros."""
    lay = layer(kind, ring_len=4, state_dtype=state_dtype)
    slots, steps = int32(4, -1, 1, 2), 11
    force = torch.zeros(steps, 4, dtype=torch.int32)
    force[2, 0] = force[5, 2] = force[6, 2] = 1
    tokens = lay.tokens(steps, 4)
    results = []
    for fill in (poison, 0.0):
        pool = Pool(lay, 6, fill)
        pool.place(slots[slots >= 0], lay.state(3))
        outs = []
        for t in range(steps):
            token = []
            for x in tokens[t]:
                wide = torch.full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + 5), fill, dtype=x.dtype)
                wide[1:-1, ..., 2:-3] = x
                wide[2] = fill  # the padding row's own input
                token.append(wide[1:-1, ..., 2:-3])
            buffer = torch.full((6, 1, 6, 20), fill, dtype=lay.io)
            outs.append(pool.step(tuple(token), slots, force[t], out=buffer[1:5]))
            assert same([buffer[[0, 5]]], [torch.full_like(buffer[:2], fill)]), "wrote outside the output"
        results.append((torch.stack(outs), pool.flushed(slots[slots >= 0])))
    assert same(*results)


@KIND
def test_slots_outside_the_batch_keep_every_bit(kind):
    lay = layer(kind, ring_len=3)
    pool, gen = Pool(lay, 8), torch.Generator().manual_seed(5)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=gen))
    before, slots = [t.clone() for t in pool.tensors], int32(6, 1, 2)
    pool.run(lay.tokens(7, 3), slots)
    pool.flushed(slots)
    others = [0, 3, 4, 5, 7]
    assert same([t[others] for t in pool.tensors], [t[others] for t in before])
    assert not torch.equal(pool.initial_state[6], before[0][6])


@KIND
def test_a_row_that_appends_writes_only_its_record_and_a_row_that_folds_only_its_state(kind):
    lay = layer(kind, ring_len=4)
    pool, slots = Pool(lay, 2, 0.5), int32(0, 1)
    tokens = lay.tokens(2, 2)
    pool.step(tokens[0], slots)
    before = [t.clone() for t in pool.tensors]
    pool.step(tokens[1], slots, int32(0, 1))
    changed = [(old != new) for old, new in zip(before, pool.tensors, strict=True)]
    assert not changed[0][0].any()
    assert changed[0][1].any()
    for cache in changed[1:]:
        assert cache[0, :, 1].any()
        assert not cache[0, :, [0, 2, 3]].any()
        assert not cache[1].any()


@KIND
def test_forced_flush_in_mid_ring_reads_no_stale_record(kind):
    """A second, shorter pass over the ring: the records past the cursor are finite and plausible, but old."""
    lay = layer(kind, ring_len=8)
    pool, slots, state, tokens = Pool(lay, 3), int32(2, 0), lay.state(2), lay.tokens(12, 2)
    pool.place(slots, state)
    force = torch.zeros(12, 2, dtype=torch.int32)
    force[11] = 1  # cursor 3 of the second period
    out = pool.run(tokens, slots, force)
    want, want_state = lay.serial(state, tokens)
    tolerance.assert_close(out, want, tolerance.output(12, 8), "output")
    tolerance.assert_close(pool.initial_state[slots.long()], want_state, tolerance.state(12, 8), "state")
    assert pool.cursor[slots.long()].tolist() == [0, 0]


@KIND
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", PADDED)
def test_padding_rows(kind, packed, where):
    """Their output is zero, their NaN input is not read, and slot 0 is not their stand-in."""
    lay, slots, steps = layer(kind, ring_len=3), PADDED[where], 8
    live = slots >= 0
    tokens = lay.tokens(steps, len(slots))
    for x in tokens[:]:
        x[:, ~live] = NAN
    pool, alone = Pool(lay, 6), Pool(lay, 6)
    for p in (pool, alone):
        p.initial_state.normal_(generator=torch.Generator().manual_seed(1))
    pool.cursor[0] = alone.cursor[0] = 0 if 0 in slots else 2
    only = type(tokens)(*(x[:, live] for x in tokens[:]))
    for t in range(steps):
        run = [p.packed_step if packed else p.step for p in (pool, alone)]
        out = run[0](tokens[t], slots)
        assert torch.equal(out[~live], torch.zeros_like(out[~live]))
        if live.any():
            want = run[1](only[t], slots[live])
            tolerance.assert_close(out[live], want, tolerance.output(12, 3), "live rows")
    tolerance.assert_close(pool.initial_state, alone.initial_state, tolerance.state(12, 3), "states")
    untouched = [s for s in range(6) if s not in slots.tolist()]
    assert torch.equal(pool.initial_state[untouched], alone.initial_state[untouched])
    assert torch.equal(pool.cursor, alone.cursor)


@KIND
def test_the_last_valid_row_of_a_padded_bucket(kind):
    """An index clamped to the last valid row shows in exactly that row."""
    lay, slots = layer(kind, ring_len=2), int32(0, 1, 2, 3, 4, 5, 6, -1)
    pool, state, tokens = Pool(lay, 7), lay.state(7), lay.tokens(5, 8)
    pool.place(slots[:7], state)
    out = pool.run(tokens, slots)
    want, want_state = lay.serial(state, type(tokens)(*(x[:, :7] for x in tokens[:])))
    tolerance.assert_close(out[:, 6], want[:, 6], tolerance.output(12, 2), "row 6")
    tolerance.assert_close(pool.flushed(slots[:7]), want_state, tolerance.state(12, 2), "state")


@KIND
@pytest.mark.parametrize("slots", [int32(1, 2, 4), int32(1, 2, 3)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_strided_pools_and_inputs(kind, state_dtype, slots):
    """Pools that are slices of larger storage are updated in that storage; inputs may have any row stride."""
    lay = layer(kind, ring_len=3, state_dtype=state_dtype)
    steps = 7
    plain, strided = Pool(lay, 5, 0.0), Pool(lay, 5, 0.0)
    storage = {}
    for name in ("initial_state", "d_cache", "k_cache", "g_cache"):
        tensor = getattr(strided, name)
        storage[name] = torch.full((5, 2, *tensor.shape[1:]), NAN, dtype=tensor.dtype)
        setattr(strided, name, storage[name][:, 1])
        getattr(strided, name).zero_()
    tokens = lay.tokens(steps, 3)
    for pool in (plain, strided):
        pool.place(slots, lay.state(3))
    for t in range(steps):
        mixed, a, b = tokens[t]
        wide = torch.full((3, mixed.shape[1] + 7), NAN, dtype=mixed.dtype)
        wide[:, 3:-4] = mixed
        transposed = a.transpose(0, -1).contiguous().transpose(0, -1)
        out = torch.full((3, 2, 6, 20), NAN)[:, 1:]
        got = strided.step((wide[:, 3:-4], transposed, b.t().contiguous().t()), slots, out=out)
        tolerance.assert_close(got, plain.step(tokens[t], slots), tolerance.output(12, 3), "strided output")
    for name, whole in storage.items():
        assert bool(whole[:, 0].isnan().all()), f"{name}: wrote between the slots"
    got, want = strided.flushed(slots), plain.flushed(slots)
    tolerance.assert_close(got, want, tolerance.state(12, 3, state_dtype), "state")
    assert torch.equal(bits(storage["initial_state"][slots.long(), 1]), bits(got))
