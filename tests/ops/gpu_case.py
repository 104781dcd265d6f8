"""What the GPU tests of the operations share: where they run, the same run on two devices, a whole decode step.

REPLAYSSM_TEST_DEVICE=cpu runs them on the CPU backend. That proves the tests, not the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from replayssm import ops, reference
from tests import tolerance
from tests.decode_case import NAN, Layer, Pool, Tokens, int32, layer
from tests.step_case import same

DEVICE = os.environ.get("REPLAYSSM_TEST_DEVICE", "cuda")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Explicit-layout kernels take the first, portable ones the others.
DIMS = [(2, 6, 128, 128), (2, 4, 96, 192), (3, 3, 80, 80), (1, 3, 33, 7)]

SLOTS, LIVE, OTHERS = int32(4, -1, 1, 6), [0, 2, 3], [0, 2, 3, 5, 7]


def index(*values: int) -> Tensor:
    return int32(*values).to(DEVICE)


def assert_agree(got: Tensor, cpu: Tensor, want: Tensor, limit: float, what: str) -> None:
    """The device within `limit` of the oracle, and so within twice that of the CPU."""
    tolerance.assert_close(got.cpu(), want, limit, f"{what} against the oracle")
    tolerance.assert_close(got.cpu(), cpu, 2 * limit, f"{what} against the CPU")


def check_run(lay: Layer, steps: int, packed: bool = False, forced: float = 0.15) -> None:
    """`steps` tokens of four rows, one of them padding, with random forced flushes: outputs, cursors and states."""
    pool, state, tokens = Pool(lay, 8), lay.state(len(LIVE)), lay.tokens(steps, len(SLOTS), 3)
    pool.place(SLOTS[LIVE].to(DEVICE), state)
    force = (torch.rand(steps, len(SLOTS), generator=torch.Generator().manual_seed(5)) < forced).int()
    before, results = pool.on("cpu"), []
    for p in (pool, pool.on("cpu")):
        device = p.layer.device
        slots = SLOTS.to(device)
        if packed:
            out = torch.stack([p.packed_step(tokens.on(device)[t], slots) for t in range(steps)])
            final = p.initial_state[slots[LIVE].long()]
        else:
            out = p.run(tokens.on(device), slots, force.to(device))
            copy = torch.full_like(p.initial_state, NAN)
            ops.materialize(*p.tensors, slots, ops.gather_cursors(p.cursor, slots), copy, slots, lay.l2norm)
            cursor = p.cursor.cpu().clone()  # on a CPU that is the same tensor, and `flushed` resets it
            final = p.flushed(slots[LIVE])
            assert bool(copy[OTHERS].isnan().all())
            limit = 2 * tolerance.state(lay.spec.head_k_dim, lay.ring_len, lay.state_dtype)
            tolerance.assert_close(copy[slots[LIVE].long()], final, limit, "materialize against flush")
        results.append((out.cpu(), final.cpu(), None if packed else cursor))
        assert not out[:, 1].any(), "a padding row must be zero"
        for new, old in zip(p.tensors, before.tensors, strict=True):
            assert same(new[OTHERS].cpu(), old[OTHERS]), "a slot outside the batch was written"
    (out, final, cursor), (cpu_out, cpu_final, cpu_cursor) = results
    want_out, want = lay.serial(state, Tokens(*(x[:, LIVE] for x in tokens[:])))
    k, ring_len = lay.spec.head_k_dim, 1 if packed else lay.ring_len
    stores = steps if packed else 1 + steps // ring_len + int(force.sum(0).max())
    state_limit = tolerance.state(k, ring_len, lay.state_dtype, stores)
    out_limit = tolerance.output(k, ring_len, lay.io) + (0 if lay.state_dtype == FP32 else state_limit)
    assert_agree(out[:, LIVE], cpu_out[:, LIVE], want_out, out_limit, "output")
    assert_agree(final, cpu_final, want, state_limit, "state")
    assert packed or torch.equal(cursor, cpu_cursor)


@dataclass
class Part:
    """A layer in a `Chain`: its pools, its static inputs and outputs, and the inputs of all steps."""

    pool: Pool
    conv_state: Tensor
    weight: Tensor
    bias: Tensor
    tokens: Tokens
    now: tuple[Tensor, Tensor, Tensor]
    mixed: Tensor
    out: Tensor


class Chain:
    """All that a decode step of a model runs between projections, for three layers: flush flags, cursors, conv, decode.

    Row 1 leaves its slot at step 9 and serves a new request, in another slot, from step 12 on. Sequence lengths and
    slots live on the device, so that a captured step can follow.
    """

    STEPS, RING, INTERVAL, LEAVES, JOINS = 30, 8, 5, 9, 12
    KINDS = ("gdn", "kda", "kda-bounded")

    def __init__(self, device: str, dims: tuple[int, int, int, int], io: torch.dtype = FP32) -> None:
        self.slots, self.lens = int32(3, 1, 0).to(device), torch.tensor([5, 17, 0], device=device)
        self.cursor, self.force = torch.zeros(7, dtype=torch.int32, device=device), int32(9, 9, 9).to(device)
        self.device, self.parts = device, []
        for i, kind in enumerate(self.KINDS):
            lay = layer(kind, dims, self.RING, io=io, device=device)
            gen, width = torch.Generator().manual_seed(20 + i), lay.spec.qkv_dim
            pool, tokens = Pool(lay, 7), lay.tokens(self.STEPS, 3, seed=i)
            pool.place(int32(3, 1, 0, 5).to(device), lay.state(4, seed=i))
            conv = torch.randn(7, width, 3, generator=gen).to(device, io)
            weight, bias = torch.randn(width, 4, generator=gen), torch.randn(width, generator=gen)
            now = tuple(x[0].clone() for x in tokens[:])
            mixed, out = torch.full_like(now[0], NAN), lay.empty_out(3)
            self.parts.append(Part(pool, conv, weight.to(device, io), bias.to(device, io), tokens, now, mixed, out))
        self.start = [t.clone() for t in self.mutable()]

    def mutable(self) -> list[Tensor]:
        """Everything that a step changes and the next one reads."""
        pools = [t for p in self.parts for t in (*p.pool.tensors, p.conv_state)]
        return [self.slots, self.lens, self.cursor, *pools]

    def restart(self) -> None:
        for tensor, old in zip(self.mutable(), self.start, strict=True):
            tensor.copy_(old)

    def step(self) -> None:
        """What is captured."""
        self.lens.add_(1)
        ops.force_flush_mask(self.lens, self.INTERVAL, self.slots, self.force)
        pos = ops.gather_cursors(self.cursor, self.slots)
        for p in self.parts:
            lay = p.pool.layer
            ops.causal_conv_update(p.now[0], p.conv_state, p.weight, p.bias, self.slots, "silu", p.mixed)
            ops.fused_recurrent_linear_replayssm_decode(
                p.mixed, *p.now[1:], lay.A_log, lay.dt_bias, None, *p.pool.tensors, p.out, self.slots, pos, self.force,
                **lay.gate_args,
            )  # fmt: skip
        ops.advance_cursors(self.cursor, self.slots, self.RING, self.force)

    def run(self, step: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """All steps from the start: outputs [T, 3 layers, 3 rows, HV, V] and cursors [T, 7 slots], on the CPU."""
        self.restart()
        outs, cursors = [], []
        for t in range(self.STEPS):
            if t in (self.LEAVES, self.JOINS):
                self.slots[1] = -1 if t == self.LEAVES else 5
                self.lens[1] = 2
            for p in self.parts:
                for static, fresh in zip(p.now, p.tokens[t], strict=True):
                    static.copy_(fresh)
            step()
            outs.append(torch.stack([p.out[:, 0] for p in self.parts]).cpu())
            cursors.append(self.cursor.cpu().clone())
        return torch.stack(outs), torch.stack(cursors)

    def states(self) -> Tensor:
        """The true states of slots 3, 1, 5, 0 of every layer, on the CPU. Leaves the pools as they are."""
        copies, slots = [], int32(3, 1, 5, 0).to(self.device)
        for p in self.parts:
            copy, pos = torch.full_like(p.pool.initial_state, NAN), ops.gather_cursors(self.cursor, slots)
            ops.materialize(*p.pool.tensors, slots, pos, copy, slots)
            copies.append(copy[slots.long()].cpu())
        return torch.stack(copies)

    def truth(self) -> tuple[Tensor, Tensor]:
        """fp64: outputs as `run` gives them, and states as `states` does."""
        outs = torch.zeros(self.STEPS, 3, *self.parts[0].out[:, 0].shape, dtype=torch.float64)
        finals: list[list[Tensor]] = []
        end, leaves, joins = self.STEPS, self.LEAVES, self.JOINS
        requests = ((3, 0, 0, end), (1, 1, 0, leaves), (5, 1, joins, end), (0, 2, 0, end))  # slot, row, from, to
        for i, p in enumerate(self.parts):
            finals.append([])
            conv_start, start = (self.start[3 + 5 * i + j].cpu() for j in (4, 0))
            for slot, row, first, last in requests:
                window, mixed = conv_start[slot : slot + 1].double(), []
                x, a, b = (tensor[first:last, row : row + 1].cpu() for tensor in p.tokens[:])
                for t in range(last - first):
                    y, window = reference.causal_conv_update(x[t], window, p.weight.cpu(), p.bias.cpu(), int32(0))
                    mixed.append(y)
                state = start[slot : slot + 1].double()
                outs[first:last, i, row : row + 1], final = p.pool.layer.serial(state, Tokens(torch.stack(mixed), a, b))
                finals[-1].append(final[0])
        return outs, torch.stack([torch.stack(f) for f in finals])


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """`step` as a CUDA graph, warmed up once; `step` itself on the CPU."""
    if DEVICE == "cpu":
        step()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def no_host_sync():
    """An error where the host would wait for the GPU."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
