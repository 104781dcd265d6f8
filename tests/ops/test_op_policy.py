"""`decode_route` reads shapes, dtype and device of a pool, never its content."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replayssm import ops
from replayssm.errors import DtypeError, OptionError, RingLengthError, ShapeError
from replayssm.kernels import policy
from tests import tolerance
from tests.decode_case import Pool, int32, layer


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("ring_len", [8, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [(), (3,)])
def test_the_heads_of_a_launch_are_rows_by_value_heads(monkeypatch, is_kda, ring_len, dtype, layers):
    """The number of slots and of layers does not count. A fake tensor raises when its content is read."""
    entry = {1: 24, 9: 48}
    monkeypatch.setitem(policy.FROM_HEADS, "cuda", {(is_kda, dtype.itemsize): entry})
    with FakeTensorMode():
        state = torch.empty(*layers, 100, 6, 20, 12, dtype=dtype, device="cuda")
    rows = (4 if ring_len == 8 else 8) - 1
    assert ops.decode_route(state, ring_len, rows, is_kda) == "packed"
    assert ops.decode_route(state, ring_len, rows + 1, is_kda) == "replay"


def test_a_cpu_replays():
    assert ops.decode_route(torch.empty(1, 1, 8, 8), 64, 1) == "replay"


@pytest.mark.parametrize(
    ("shape", "dtype", "ring_len", "rows", "error", "said"),
    [
        ((4, 6, 8), torch.float32, 8, 1, ShapeError, "3 axes"),
        ((4, 6, 8, 257), torch.float32, 8, 1, ShapeError, "K = 257"),
        ((4, 6, 8, 8), torch.float64, 8, 1, DtypeError, "float64"),
        ((4, 6, 8, 8), torch.float32, 65, 1, RingLengthError, "65"),
        ((4, 6, 8, 8), torch.float32, 8, -1, OptionError, "rows = -1"),
    ],
)
def test_refusals(shape, dtype, ring_len, rows, error, said):
    with pytest.raises(error, match=said):
        ops.decode_route(torch.empty(shape, dtype=dtype), ring_len, rows)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_slots_change_routes_as_documented(kind):
    """Batches of 2 replay, of 1 decode packed: flush once, leave the cursor at 0, and replay again from there."""
    lay, steps = layer(kind, ring_len=4), 14
    pool, tokens, state = Pool(lay, 3), lay.tokens(steps, 2), lay.state(2)
    slots, outs = int32(2, 0), []
    pool.place(slots, state)
    for t in range(steps):
        if t < 6 or t >= 11:
            outs.append(pool.step(tokens[t], slots))
            continue
        if t == 6:
            pool.flushed(slots)
        outs.append(torch.cat([pool.packed_step(tokens[t, row : row + 1], slots[row : row + 1]) for row in (0, 1)]))
        assert pool.cursor.tolist() == [0, 0, 0]
    assert pool.cursor.tolist() == [3, 0, 3]
    want, final = lay.serial(state, tokens)
    tolerance.assert_close(torch.stack(outs), want, tolerance.output(lay.spec.head_k_dim, 4), "output")
    tolerance.assert_close(pool.flushed(slots), final, tolerance.state(lay.spec.head_k_dim, 4), "state")
