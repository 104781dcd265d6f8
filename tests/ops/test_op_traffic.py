"""Counted bytes against a count by hand and against the model of `replayssm.spec`."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from replayssm.spec import packed_traffic, replay_traffic
from tests.decode_case import Pool, int32, layer

IO = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def by_hand(lay, slots, steps, force, cursor):
    """Row by row, in plain Python; H=2 HV=6 K=12 V=20."""
    gate = 6 * 12 if lay.spec.is_kda else 6
    record = 6 * 20 * 4 + 2 * 12 * IO[lay.io] + gate * 4
    size = 6 * 20 * 12 * IO[lay.state_dtype]
    names = ("state_read", "state_written", "ring_read", "ring_written", "rows", "appends", "flushes")
    want = dict.fromkeys(names, 0)
    for t in range(steps):
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            want["rows"] += 1
            want["state_read"] += size
            want["ring_read"] += cursor[slot] * record
            if cursor[slot] == lay.ring_len - 1 or force[t][row]:
                want["state_written"] += size
                want["flushes"] += 1
                cursor[slot] = 0
            else:
                want["ring_written"] += record
                want["appends"] += 1
                cursor[slot] += 1
    return want


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_decode_equals_a_count_by_hand(kind, io, state_dtype):
    lay = layer(kind, ring_len=4, io=io, state_dtype=state_dtype)
    slots, steps = int32(4, -1, 0, 2), 23
    pool, tokens = Pool(lay, 5, 0.0), lay.tokens(steps, 4)
    pool.cursor[2] = 3
    force = (torch.rand(steps, 4, generator=torch.Generator().manual_seed(2)) < 0.2).int()
    want = by_hand(lay, slots.tolist(), steps, force.tolist(), pool.cursor.tolist())
    with ops.count_traffic() as traffic:
        pool.run(tokens, slots, force)
    assert traffic.totals()._asdict() == want


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("ring_len", [1, 2, 16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_whole_periods_equal_the_model(kind, ring_len, state_dtype):
    lay = layer(kind, ring_len=ring_len, io=torch.bfloat16, state_dtype=getattr(torch, state_dtype))
    pool, tokens = Pool(lay, 3, 0.0), lay.tokens(2 * ring_len, 2)
    with ops.count_traffic() as traffic:
        pool.run(tokens, int32(2, 0))
    total, per_token = traffic.totals(), 2 * 2 * ring_len
    model = replay_traffic(lay.spec, ring_len, state_dtype, "bfloat16")
    assert (total.state_read + total.ring_read) / per_token == model.read
    assert (total.state_written + total.ring_written) / per_token == pytest.approx(model.written, rel=1e-12)
    with ops.count_traffic() as traffic:
        pool.packed_step(tokens[0], int32(-1, 1))
    total = traffic.totals()
    assert (total.state_read, total.state_written) == tuple(packed_traffic(lay.spec, state_dtype))
    assert total[2:] == (0, 0, 1, 0, 0)


def test_flush_and_materialize_of_two_layers():
    lay = layer("kda", ring_len=4)
    pool = Pool(lay, 5, 0.0)
    pools = [torch.stack([t, t]) for t in pool.tensors]
    size, record = pool.initial_state[0].nbytes, sum(t[0].nbytes // 4 for t in pool.tensors[1:])
    with ops.count_traffic() as outer:
        with ops.count_traffic() as traffic:
            ops.flush(*pools, int32(0, 1, -1, 2), int32(3, 0, 2, 4))
        total = traffic.totals()
        assert total.state_read == total.state_written == 2 * 2 * size
        assert (total.ring_read, total.ring_written) == (2 * 7 * record, 0)
        assert (total.flushes, total.rows) == (2 * 2, 0)
        with ops.count_traffic() as traffic:
            dst = torch.zeros(2, 4, *pools[0].shape[2:], dtype=torch.bfloat16)
            ops.materialize(*pools, int32(0, 1, -1, 2), int32(3, 0, 2, 4), dst, int32(3, 2, 1, -1))
        total = traffic.totals()
        assert (total.state_read, total.state_written) == (2 * 2 * size, 2 * 2 * size // 2)
        assert (total.ring_read, total.flushes) == (2 * 3 * record, 0)
    assert outer.totals().state_read == 2 * 4 * size


def test_nothing_is_counted_outside_and_a_failing_block_ends_too():
    lay = layer("gdn")
    pool, tokens = Pool(lay, 3, 0.0), lay.tokens(1, 2)
    with pytest.raises(KeyError), ops.count_traffic() as traffic:
        raise KeyError
    pool.step(tokens[0], int32(0, 1))
    assert set(traffic.totals()) == {0}
