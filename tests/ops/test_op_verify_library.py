"""The registered window operations under torch's own checker, and inside a compiled graph."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from tests.decode_case import Pool, int32, layer
from tests.verify_case import empty_out, inputs

OPS = torch.ops.replayssm


def cases():
    for kind in ("gdn", "kda"):
        for slots in (int32(3, -1, 0), int32(1, 2, 3)):
            lay = layer(kind, ring_len=5)
            pool, window, out = Pool(lay, 5, 0.25), inputs(lay, 3, 3), empty_out(lay, 3, 3).zero_()
            head, tail = (*window, lay.A_log, lay.dt_bias, 0.3), (True, kind == "kda", None, 1.0)
            name, counts = f"{kind}-{int(slots.min())}", int32(3, 2, 1)
            for force in (None, int32(1, 0, 0)):
                args = (*head, *pool.tensors, out, slots, int32(4, 0, 1), counts, force, *tail)
                yield f"replay_verify-{name}-{force is not None}", OPS.replay_verify, args
            for kept in (None, torch.zeros(3, 3, 6, 20, 12)):
                args = (*head, pool.initial_state, kept, out, slots, counts, *tail)
                yield f"packed_verify-{name}-{kept is not None}", OPS.packed_verify, args
            args = (*head[:-1], pool.initial_state, slots, counts, *tail)
            yield f"commit_kv_replay-{name}", OPS.commit_kv_replay, args
            args = (pool.initial_state, torch.ones(3, 3, 6, 20, 12), slots, counts)
            yield f"commit_snapshot-{name}", OPS.commit_snapshot, args
    slots, counts = int32(3, -1, 0), int32(2, 0, 1)
    for force in (None, int32(0, 1, 1)):
        args = (int32(0, 1, 2, 3), slots, 4, counts, counts, force)
        yield f"commit_cursors-{force is not None}", OPS.commit_cursors, args
    yield "commit_conv", OPS.commit_conv, (torch.randn(4, 7, 3), torch.randn(3, 2, 7), slots, counts)
    conv = (torch.randn(3, 2, 7), torch.randn(4, 7, 3), torch.randn(7, 4))
    for bias in (None, torch.randn(7)):
        args = (*conv, bias, slots, counts, "silu", torch.zeros(3, 2, 7))
        yield f"causal_conv_verify-{bias is not None}", OPS.causal_conv_verify, args


@pytest.mark.parametrize(("op", "args"), [pytest.param(op, args, id=name) for name, op, args in cases()])
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


def test_mutated_arguments_are_named():
    def mutated(op):
        return {a.name for a in op.default._schema.arguments if a.alias_info and a.alias_info.is_write}

    assert mutated(OPS.replay_verify) == {"initial_state", "out", "d_cache", "k_cache", "g_cache"}
    assert mutated(OPS.packed_verify) == {"snapshots", "out"}
    assert mutated(OPS.causal_conv_verify) == {"out"}
    assert mutated(OPS.commit_cursors) == {"cursor"}
    assert mutated(OPS.commit_conv) == {"conv_state"}
    assert mutated(OPS.commit_snapshot) == {"initial_state"}
    assert mutated(OPS.commit_kv_replay) == {"initial_state"}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_compiled_step_equals_an_eager_one(kind):
    """Conv, verify and both commits in one graph, for several windows."""
    lay, slots, steps = layer(kind, ring_len=6), int32(2, 0), 6
    window, weight = inputs(lay, 2, 4 * steps), torch.randn(lay.spec.qkv_dim, 4)

    def forward(x, a, b, lengths, kept, cursor, conv, tensors):
        pos = ops.gather_cursors(cursor, slots)
        mixed = ops.causal_conv_verify(x, conv, weight, None, slots, lengths)
        out = torch.empty(2, 4, 6, 20)
        ops.fused_recurrent_linear_replayssm_verify(
            mixed, a, b, lay.A_log, lay.dt_bias, None, *tensors, out, slots, pos, lengths, is_kda=kind == "kda"
        )
        ops.commit_cursors(cursor, slots, 6, lengths, kept)
        ops.commit_conv(conv, x, slots, kept)
        return out

    results = []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        pool, cursor = Pool(lay, 3, 0.0), torch.zeros(3, dtype=torch.int32)
        conv = torch.zeros(3, lay.spec.qkv_dim, 3)
        pool.place(slots, lay.state(2))
        outs = []
        with torch.no_grad():
            for t in range(steps):
                now = (x[:, 4 * t : 4 * t + 4] for x in window)
                outs.append(run(*now, int32(4, 1 + t % 4), int32(t % 5, t % 2), cursor, conv, pool.tensors))
        results.append((torch.stack(outs), cursor, conv, pool.initial_state))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)
