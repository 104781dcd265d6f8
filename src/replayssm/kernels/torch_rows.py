"""Which rows of a batch lie next to each other in the pool, so that the state is viewed, not gathered."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """`length` live rows from `row` on, whose slots are `slot`, `slot + 1`, …"""

    row: int
    slot: int
    length: int
    flush: bool


class Rows(NamedTuple):
    """The live rows of a batch, renumbered 0 … n-1."""

    slots: list[int]
    live: list[int] | None = None  # original row numbers; None when every row is live
    where: Tensor | None = None  # `live` as a tensor

    def take(self, x: Tensor) -> Tensor:
        """The live rows of `x`."""
        return x if self.where is None else x.index_select(0, self.where)

    def pick(self, values: list[int]) -> list[int]:
        """The live entries of a host list."""
        return values if self.live is None else [values[i] for i in self.live]


def live_rows(ssm_state_indices: Tensor) -> Rows:
    """Rows with a slot >= 0; the others are padding and reach nothing, not even slot 0."""
    slots = ssm_state_indices.tolist()
    if not slots or min(slots) >= 0:
        return Rows(slots)
    live = [i for i, slot in enumerate(slots) if slot >= 0]
    return Rows([slots[i] for i in live], live, torch.tensor(live, device=ssm_state_indices.device))


def runs(slots: list[int], flush: list[bool], joined: bool) -> list[Run]:
    """Split rows into runs of consecutive slots with the same flush decision; no joining unless `joined`."""
    out: list[Run] = []
    start = 0
    for i in range(1, len(slots) + 1):
        if i < len(slots) and joined and slots[i] == slots[i - 1] + 1 and flush[i] == flush[start]:
            continue
        out.append(Run(start, slots[start], i - start, flush[start]))
        start = i
    return out


def run_slice(run: Run, per_row: int) -> slice:
    """The flattened (row, head) entries of a run, `per_row` heads a row."""
    return slice(run.row * per_row, (run.row + run.length) * per_row)


def consecutive(slots: list[int]) -> bool:
    """Whether the slots are s, s + 1, …"""
    first, n = slots[0], len(slots)
    return n == 1 or (slots[-1] - first == n - 1 and slots == list(range(first, first + n)))


def gather(pool: Tensor, slots: list[int]) -> Tensor:
    """pool[slots]; a view when the slots are consecutive."""
    if consecutive(slots):
        return pool if len(slots) == pool.shape[0] else pool.narrow(0, slots[0], len(slots))
    return pool.index_select(0, torch.tensor(slots, device=pool.device))


def slots_joined(state: Tensor) -> bool:
    """Whether consecutive slots of [slots, HV, V, K] flatten to [rows·HV, V, K] as a view."""
    return state.stride(0) == state.shape[1] * state.stride(1)


def heads(state: Tensor, run: Run) -> Tensor:
    """The states of a run as a view [rows·HV, V, K]."""
    return state.narrow(0, run.slot, run.length).view(-1, state.shape[2], state.shape[3])


def store(dst: Tensor, src: Tensor) -> None:
    """Round fp32 `src` into `dst`. fp16 saturates: a state past 65504 must not become inf."""
    if dst.dtype == torch.float16:
        src = src.clamp(-65504.0, 65504.0)
    dst.copy_(src)
