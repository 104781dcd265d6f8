"""Live rows of a batch and their places in a pool. A run of consecutive slots is viewed, anything else gathered."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The n live rows of a batch.

    where: their row numbers [n], None when every row is live. slots: their slots [n] int64. first: the first slot
    when the slots are first, first + 1, …, else None.
    """

    where: Tensor | None
    slots: Tensor
    first: int | None

    @property
    def length(self) -> int:
        """n."""
        return self.slots.shape[0]

    def take(self, x: Tensor) -> Tensor:
        """The live rows of a tensor of the batch."""
        return x if self.where is None else x.index_select(0, self.where)

    def put(self, out: Tensor, value: Tensor) -> None:
        """Write the live rows of a tensor of the batch."""
        if self.where is None:
            out.copy_(value)
        else:
            out.index_copy_(0, self.where, value.to(out.dtype))

    def gather(self, pool: Tensor) -> Tensor:
        """pool[slots], a view of the pool when the slots are consecutive."""
        if self.first is not None:
            return pool.narrow(0, self.first, self.length)
        return pool.index_select(0, self.slots)

    def some(self, which: Tensor) -> Rows:
        """The rows `which`, positions among the live rows; their `where` is `which`."""
        slots = self.slots.index_select(0, which)
        return Rows(which, slots, _first(slots))


def live_rows(ssm_state_indices: Tensor) -> Rows:
    """Rows with a slot >= 0; the others are padding and reach nothing, not even slot 0."""
    slots, where = ssm_state_indices.long(), None
    live = slots >= 0
    if not live.all():
        where = live.nonzero().squeeze(1)
        slots = slots.index_select(0, where)
    return Rows(where, slots, _first(slots))


def _first(slots: Tensor) -> int | None:
    length = slots.shape[0]
    if length == 0:
        return None
    first = int(slots[0])
    if length > 1 and not torch.equal(slots, torch.arange(first, first + length, device=slots.device)):
        return None
    return first


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `x` in a storage dtype. fp16 saturates: a state past 65504 must not become inf."""
    return x.clamp(-65504.0, 65504.0).half() if dtype == torch.float16 else x.to(dtype)
