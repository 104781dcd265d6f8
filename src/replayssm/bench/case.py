"""A layer with random weights, its tokens, and copies of its pools: what a check or a timing runs on.

Copies stand for the layers of a model. They share cursors, as layers do, and are worked on in turn, so that no state
is still in a cache when its turn comes again. The cursors are moved by `ops.advance_cursors` when a case is built,
and each step then finds its own row of `write_pos`. A model moves them once per token after its last layer, so that
launch belongs to no layer and is not part of a timed step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import ops
from replayssm.spec import LayerSpec


@dataclass(frozen=True)
class Shape:
    """Everything that a launch depends on."""

    spec: LayerSpec
    batch: int
    ring_len: int
    state_dtype: str
    io_dtype: str
    device: torch.device

    @property
    def state_bytes(self) -> int:
        """Of one copy."""
        return self.spec.state_array(self.batch, self.state_dtype).nbytes


class Case:
    """Tensors as the ops take them: mixed_qkv, a, b lists over tokens, pools and outputs lists over copies.

    `write_pos` and `force` [T, B] are the schedule of T steps, `last` [B] the cursors after them.
    """

    def __init__(self, shape: Shape, copies: int, tokens: int, start: Tensor, force: Tensor, dead_ring: bool) -> None:
        self.shape, self.copies = shape, copies
        spec, rows, device = shape.spec, shape.batch, shape.device
        io, state = getattr(torch, shape.io_dtype), getattr(torch, shape.state_dtype)
        gen = torch.Generator(device).manual_seed(1 + rows)

        def normal(size: tuple[int, ...], dtype: torch.dtype, std: float = 1.0) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(0, std, generator=gen)

        hv = spec.num_v_heads
        gate = (hv, spec.head_k_dim) if spec.is_kda else (hv,)
        self.A_log = torch.rand(hv, generator=gen, device=device) * 2 - 1.5
        self.dt_bias = normal(gate, torch.float32) - 1
        self.mixed_qkv = [normal((rows, spec.qkv_dim), io) for _ in range(tokens)]
        self.a = [normal((rows, *gate), io) for _ in range(tokens)]
        self.b = [normal((rows, hv), io) for _ in range(tokens)]
        self.slots = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).int().to(device)
        self.state = [normal(spec.state_array(rows).shape, state, 0.1) for _ in range(copies)]
        self.out = [normal((rows, 1, hv, spec.head_v_dim), io).fill_(float("nan")) for _ in range(copies)]
        arrays = spec.ring_arrays(shape.ring_len, rows, shape.io_dtype)
        self.d = [normal(arrays.d.shape, torch.float32, 0.1) for _ in range(copies)]
        self.k = [normal(arrays.k.shape, io) for _ in range(copies)]
        self.g = [normal(arrays.g.shape, torch.float32, 0.3).abs_().neg_() for _ in range(copies)]
        if dead_ring:  # nothing of a ring may count before it is written
            for cache in (*self.d, *self.k, *self.g):
                cache.fill_(float("nan"))
        self.force = force.to(device)
        self.write_pos, self.last = self._cursors(start)

    @property
    def gate_options(self) -> dict[str, bool | float | None]:
        """Keywords of the ops and of the reference."""
        spec = self.shape.spec
        return {"is_kda": spec.is_kda, "lower_bound": spec.lower_bound, "beta_scale": spec.beta_scale}

    def token(self, t: int, copy: int) -> tuple[Tensor, Tensor, Tensor]:
        """mixed_qkv, a and b of step t in one copy."""
        at = (t + copy) % len(self.mixed_qkv)
        return self.mixed_qkv[at], self.a[at], self.b[at]

    def _cursors(self, start: Tensor) -> tuple[Tensor, Tensor]:
        cursor = torch.empty_like(self.slots)
        cursor[self.slots.long()] = start.int().to(cursor.device)
        positions = []
        for t in range(len(self.force)):
            positions.append(ops.gather_cursors(cursor, self.slots))
            ops.advance_cursors(cursor, self.slots, self.shape.ring_len, self.force[t])
        return torch.stack(positions), ops.gather_cursors(cursor, self.slots)


def check_case(shape: Shape) -> Case:
    """From empty rings, L steps and a few: all rows reach the end of a ring and leave another one part full.

    Odd rows are forced to flush early, at different steps, so that the batch is in different phases.
    """
    steps, rows = shape.ring_len + 4, shape.batch
    steps += steps % shape.ring_len == 0  # the last flush must have something to do
    row = torch.arange(rows)
    force = ((torch.arange(steps)[:, None] == row % 3) & (row % 2 == 1)).int()
    return Case(shape, 1, steps, torch.zeros(rows), force, dead_ring=True)


def timed_case(shape: Shape, copies: int) -> Case:
    """One ring period, staggered: at each step the rows are spread over all phases. Nothing is forced to flush.

    The flags are passed all the same, all zero, as an engine does.
    """
    force = torch.zeros(shape.ring_len, shape.batch, dtype=torch.int32)
    return Case(shape, copies, copies, torch.arange(shape.batch) % shape.ring_len, force, dead_ring=False)
