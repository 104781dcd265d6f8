"""The registered operations under torch's own checker, and inside a compiled graph."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from tests.decode_case import Pool, int32, layer

OPS = torch.ops.replayssm


def decode_args(kind, padded=True):
    lay = layer(kind, ring_len=4)
    pool = Pool(lay, 5, 0.25)
    slots = int32(3, -1, 0) if padded else int32(1, 2, 3)
    head = (*lay.tokens(1, 3)[0], lay.A_log, lay.dt_bias, 0.3)
    tail = (True, kind == "kda", None, 1.0)
    return head, pool, lay.empty_out(3).zero_(), slots, tail


def cases():
    for kind in ("gdn", "kda"):
        for padded in (True, False):
            head, pool, out, slots, tail = decode_args(kind, padded)
            for force in (None, int32(1, 0, 0)):
                args = (*head, *pool.tensors, out, slots, int32(2, 0, 1), force, *tail)
                yield f"replay_decode-{kind}-{padded}-{force is not None}", OPS.replay_decode, args
            yield f"packed_decode-{kind}-{padded}", OPS.packed_decode, (*head, pool.initial_state, out, slots, *tail)
            yield f"flush-{kind}-{padded}", OPS.flush, (*pool.tensors, slots, int32(2, 0, 1), True)
            dst = (torch.zeros_like(pool.initial_state), int32(0, 1, 2), True)
            yield f"materialize-{kind}-{padded}", OPS.materialize, (*pool.tensors, slots, int32(2, 0, 1), *dst)
    cursor, slots = int32(0, 1, 2, 3), int32(3, -1, 0)
    yield "advance_cursors", OPS.advance_cursors, (cursor, slots, 4, None, None)
    yield "advance_cursors-all", OPS.advance_cursors, (cursor, slots, 4, int32(1, 0, 0), int32(2, 2, 1))
    yield "gather_cursors", OPS.gather_cursors, (cursor, slots)
    for index in (None, slots):
        args = (torch.tensor([4, 8, 9]), 4, index, int32(0, 0, 0))
        yield f"force_flush_mask-{index is not None}", OPS.force_flush_mask, args
    conv = (torch.randn(3, 7), torch.randn(4, 7, 3), torch.randn(7, 4))
    for bias in (None, torch.randn(7)):
        args = (*conv, bias, slots, "silu", torch.zeros(3, 7))
        yield f"causal_conv_update-{bias is not None}", OPS.causal_conv_update, args


@pytest.mark.parametrize(("op", "args"), [pytest.param(op, args, id=name) for name, op, args in cases()])
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_mutated_arguments_are_named():
    def mutated(op):
        return {a.name for a in op.default._schema.arguments if a.alias_info and a.alias_info.is_write}

    ring = {"d_cache", "k_cache", "g_cache"}
    assert mutated(OPS.replay_decode) == {"initial_state", "out"} | ring
    assert mutated(OPS.packed_decode) == {"initial_state", "out"}
    assert mutated(OPS.flush) == {"initial_state"}
    assert mutated(OPS.materialize) == {"dst_state"}
    assert mutated(OPS.advance_cursors) == {"cursor"}
    assert mutated(OPS.gather_cursors) == set()
    assert mutated(OPS.force_flush_mask) == {"out"}
    assert mutated(OPS.causal_conv_update) == {"conv_state", "out"}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_one_compiled_graph_serves_every_phase_and_counts_its_traffic(kind):
    """Two layers, cursor advanced inside: no graph break, one compilation, the same values as eager."""
    lay = layer(kind, ring_len=4)
    slots, tokens = int32(2, 0), lay.tokens(11, 2)
    compiles = 0

    def backend(graph, inputs):
        nonlocal compiles
        compiles += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def forward(mixed, a, b, force, cursor, pools):
        pos = ops.gather_cursors(cursor, slots)
        total = 0
        for tensors in pools:
            out = torch.empty(2, 1, 6, 20)
            ops.fused_recurrent_linear_replayssm_decode(
                mixed, a, b, lay.A_log, lay.dt_bias, None, *tensors, out, slots, pos, force, is_kda=kind == "kda"
            )
            total = total + out
        ops.advance_cursors(cursor, slots, 4, force)
        return total

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    results = []
    for run in (forward, compiled):
        pools = [Pool(lay, 3, 0.0) for _ in range(2)]
        for pool in pools:
            pool.place(slots, lay.state(2))
        cursor = torch.zeros(3, dtype=torch.int32)
        force = [int32(t == 5, 0) for t in range(11)]
        with torch.no_grad(), ops.count_traffic() as traffic:
            outs = [run(*tokens[t], force[t], cursor, [p.tensors for p in pools]) for t in range(11)]
        results.append((torch.stack(outs), cursor, pools[0].initial_state, traffic.totals()))
    for eager, graph in zip(results[0][:3], results[1][:3], strict=True):
        assert torch.equal(eager, graph)
    assert results[0][3] == results[1][3]
    assert results[0][3].rows == 11 * 2 * 2
    assert compiles == 1
