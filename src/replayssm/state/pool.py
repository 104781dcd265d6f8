"""Slots for the linear layers of a model: recurrent state, conv window, ring and cursor of each request.

A slot belongs to one request from `allocate` to `free`. Its true state is checkpoint + ring[0:cursor], one cursor for
all layers, which the owner of the forward moves once per forward (`gather_cursors`, `advance_cursors`). Everything here
that reads a state for somebody else folds the ring on the way, so a ring never leaves its slot.

No slot number is special: padding rows of a batch carry -1. The pool's books are kept on the host. Only `offload` and
`restore` wait for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import ops
from replayssm.errors import OptionError, PoolFullError, ShapeError, SlotError
from replayssm.spec import DEFAULT_RING_LEN, LayerSpec, check_ring_len, check_state_dtype
from replayssm.state.host import upload


class LayerState(NamedTuple):
    """What one layer's ops take, all slots: views into the pool. Without a ring `d`, `k` and `g` are None."""

    state: Tensor
    conv: Tensor
    d: Tensor | None
    k: Tensor | None
    g: Tensor | None


@dataclass(frozen=True)
class HostState:
    """A flushed state on the CPU: state [layers, HV, V, K], conv [layers, C, W-1]. Any free slot can take it."""

    state: Tensor
    conv: Tensor

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.state.nbytes + self.conv.nbytes


class SlotPool:
    """`slots` slots for all linear layers of a model, on one device.

    Args:
        specs: the linear layers in order; all of one geometry.
        slots: how many.
        ring_len: L, or None for a pool whose requests decode packed and need no ring.
        state_dtype: float32, bfloat16 or float16.
        io_dtype: of activations, conv windows and the ring's k.
        device: of all tensors.
        folded_conv: keep, besides, the conv window of each slot at its last fold, see `copy_folded_to`.

    Attributes:
        state: [layers, slots, HV, V, K].
        conv: [layers, slots, C, W-1], in the activations' dtype; channels are neighbours in memory.
        d, k, g: the ring, see `LayerSpec.ring_arrays`, with a leading layer axis; None without a ring.
        cursor: [slots] int32, records of each slot.
        folded_conv: as `conv`, with one more slot that takes what is nobody's; None unless asked for.

    Raises `ShapeError`, `RingLengthError`, `DtypeError`.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        slots: int,
        ring_len: int | None = DEFAULT_RING_LEN,
        state_dtype: str = "float32",
        io_dtype: str = "bfloat16",
        device: str | torch.device = "cpu",
        folded_conv: bool = False,
    ) -> None:
        self.spec = _one_geometry(specs)
        if slots < 1:
            raise ShapeError(f"a pool of {slots} slots holds no request; it needs at least 1")
        check_state_dtype(state_dtype)
        self.layers, self.slots, self.ring_len = len(specs), slots, ring_len
        self.device = torch.device(device)

        def zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
            return torch.zeros(self.layers, *shape, dtype=getattr(torch, dtype), device=self.device)

        self.state = zeros(*self.spec.state_array(slots, state_dtype))
        (_, channels, width), conv_dtype = self.spec.conv_array(slots, io_dtype)
        self.conv = zeros((slots, width, channels), conv_dtype).mT  # neighbours in memory are channels
        self.folded_conv: Tensor | None = None
        if folded_conv and ring_len is not None:
            self.folded_conv = zeros((slots + 1, width, channels), conv_dtype).mT
        self.d: Tensor | None = None
        self.k: Tensor | None = None
        self.g: Tensor | None = None
        if ring_len is not None:
            self.d, self.k, self.g = (zeros(*array) for array in self.spec.ring_arrays(ring_len, slots, io_dtype))
        self.cursor = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self._free = deque(range(slots))
        self._owner: dict[int, object] = {}

    @staticmethod
    def slot_bytes(
        specs: Sequence[LayerSpec],
        ring_len: int | None = DEFAULT_RING_LEN,
        state_dtype: str = "float32",
        io_dtype: str = "bfloat16",
        folded_conv: bool = False,
    ) -> int:
        """Bytes of one slot of such a pool, ring and cursor included."""
        spec = _one_geometry(specs)
        ring = 0 if ring_len is None else spec.ring_arrays(check_ring_len(ring_len), 1, io_dtype).nbytes
        conv = spec.conv_array(1, io_dtype).nbytes * (2 if folded_conv and ring_len is not None else 1)
        one = spec.state_array(1, state_dtype).nbytes + conv + ring
        return len(specs) * one + 4

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        tensors = (self.state, self.conv, self.folded_conv, self.d, self.k, self.g, self.cursor)
        return sum(x.nbytes for x in tensors if x is not None)

    @property
    def free_slots(self) -> int:
        """How many can be allocated."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """How many are."""
        return len(self._owner)

    def can_allocate(self, count: int = 1) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= len(self._free)

    def allocate(self, count: int = 1, owner: object = None) -> list[int]:
        """`count` distinct slots with an empty ring, a state of zeros and an empty conv window.

        The slot that was free the longest comes first. `owner` is for messages. Raises `PoolFullError`, for a count
        below 0 `OptionError`, with nothing allocated.
        """
        if count < 0:
            raise OptionError(f"{count} slots cannot be allocated; ask for 0 or more")
        if not self.can_allocate(count):
            raise PoolFullError(
                f"{count} slots asked for, {len(self._free)} of {self.slots} are free; wait for a request to end, or "
                "give the pool more memory"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._owner.update(dict.fromkeys(taken, owner))
        if taken:
            index = self._index(taken).long()
            for pool in (self.state, self.conv):
                pool.index_fill_(1, index, 0)
            self.cursor.index_fill_(0, index, 0)
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back. Raises `SlotError`, with nothing freed, when one is free already or named twice."""
        slots = self._live(slots)
        for slot in slots:
            del self._owner[slot]
            self._free.append(slot)

    def layer(self, index: int) -> LayerState:
        """Views of one layer, for the decode ops."""
        d, k, g = (None if x is None else x[index] for x in (self.d, self.k, self.g))
        return LayerState(self.state[index], self.conv[index], d, k, g)

    def index(self, slots: Sequence[int]) -> Tensor:
        """Slots as the ops take them [N] int32, for rows of a batch; -1 stays what it is, a padding row."""
        self._live(slot for slot in slots if slot >= 0)
        return self._index(slots)

    def flush(self, slots: Iterable[int]) -> None:
        """Fold the rings of these slots into their checkpoints, in all layers; their cursors become 0."""
        slots = self._live(slots)
        if self.d is None or self.k is None or self.g is None or not slots:
            return
        index = self._index(slots)
        ops.flush(self.state, self.d, self.k, self.g, index, ops.gather_cursors(self.cursor, index))
        self.cursor.index_fill_(0, index.long(), 0)

    def copy(self, src: int, dst: int) -> None:
        """Give `dst` the true state and conv window of `src`, which keeps its ring. Both are in use."""
        source, target = self._live((src, dst))
        self._copy([source], [target])

    def copy_to(self, src: int, pool: SlotPool, dst: int) -> None:
        """The same to a slot of another pool of the same layers and conv dtype; the state's dtype may differ."""
        (source,), (target,) = self._live((src,)), pool._live((dst,))
        self._copy([source], [target], pool)

    def keep_conv(self, slots: Sequence[int]) -> None:
        """Remember the conv windows of slots whose rings are empty and will be used from now on."""
        if self.folded_conv is not None and slots:
            index = self._index(slots).long()
            self.folded_conv.index_copy_(1, index, self.conv.index_select(1, index))

    def keep_folded_conv(self, slots: Tensor) -> None:
        """After a step of rows `slots` [B] int32 that moved the cursors: remember the windows of those that folded.
        Does not wait for the device."""
        if self.folded_conv is not None:
            own = slots.clamp_min(0).long()
            folded = (slots >= 0) & (self.cursor[own] == 0)
            target = torch.where(folded, own, self.slots)
            self.folded_conv.index_copy_(1, target, self.conv.index_select(1, own))

    def copy_folded_to(self, src: int, pool: SlotPool, dst: int) -> None:
        """Give a slot of another pool the state and conv window that `src` had at its last fold, its ring left out.

        Needs `folded_conv`, and every step since the ring was empty told to `keep_conv` and `keep_folded_conv`.
        """
        assert self.folded_conv is not None
        (source,), (target,) = self._live((src,)), pool._live((dst,))
        pool.state[:, target] = self.state[:, source].to(pool.state.dtype)
        pool.conv[:, target] = self.folded_conv[:, source]
        pool.cursor[target] = 0

    def fork(self, src: int, count: int = 1, owner: object = None) -> list[int]:
        """`count` new slots with the true state of `src`, which keeps its ring. Raises `PoolFullError`, with nothing
        allocated."""
        (src,) = self._live((src,))
        made = self.allocate(count, owner)
        self._copy([src] * count, made)
        return made

    def offload(self, slot: int) -> HostState:
        """Flush a slot and copy it to the CPU. The slot stays allocated. Waits for the device."""
        self.flush([slot])
        return HostState(*(pool[:, slot].to("cpu", copy=True) for pool in (self.state, self.conv)))

    def restore(self, slot: int, saved: HostState) -> None:
        """Put a saved state into an allocated slot. Raises `ShapeError` when it is of another model or dtype."""
        (slot,) = self._live((slot,))
        for name, mine, theirs in (
            ("state", self.state[:, slot], saved.state),
            ("conv", self.conv[:, slot], saved.conv),
        ):
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise ShapeError.mismatch(
                    f"saved {name} ({theirs.dtype})",
                    list(theirs.shape),
                    f"{list(mine.shape)} ({mine.dtype})",
                    "the pool's",
                )
        self.state[:, slot] = saved.state.to(self.device)
        self.conv[:, slot] = saved.conv.to(self.device)
        self.cursor[slot] = 0

    def transfer_buffers(self) -> dict[str, Tensor]:
        """What a copy to another machine must carry, [layers, slots, …] each, of slots that were flushed before: no
        ring and no cursor, which are empty then."""
        return {"state": self.state, "conv": self.conv}

    def check(self) -> None:
        """The books: every slot is free or owned, and once. Raises `SlotError`."""
        found = sorted([*self._free, *self._owner])
        if found != list(range(self.slots)):
            raise SlotError(f"{self.slots} slots, but free and used ones together are {found}")

    def _copy(self, src: list[int], dst: list[int], pool: SlotPool | None = None) -> None:
        if not dst:
            return
        into = pool or self
        one, other = self._index(src), self._index(dst)
        if self.d is None or self.k is None or self.g is None:
            into.state.index_copy_(1, other.long(), self.state.index_select(1, one.long()).to(into.state.dtype))
        else:
            pos = ops.gather_cursors(self.cursor, one)
            ops.materialize(self.state, self.d, self.k, self.g, one, pos, into.state, other)
        into.conv.index_copy_(1, other.long(), self.conv.index_select(1, one.long()))
        into.cursor.index_fill_(0, other.long(), 0)

    def _index(self, slots: Sequence[int]) -> Tensor:
        return upload(slots, torch.int32, self.device)

    def _name(self, slot: int) -> str:
        owner = self._owner[slot]
        return "an unnamed owner" if owner is None else str(owner)

    def _live(self, slots: Iterable[int]) -> list[int]:
        """Plain numbers of slots that are in use, each named once."""
        checked: list[int] = []
        for slot in map(int, slots):
            if slot not in self._owner:
                known = 0 <= slot < self.slots
                what = "is free: it was given back, or never allocated" if known else f"is outside 0…{self.slots - 1}"
                raise SlotError(f"slot {slot} {what}")
            checked.append(slot)
        if len(set(checked)) < len(checked):
            twice = next(slot for slot in checked if checked.count(slot) > 1)
            raise SlotError(f"slot {twice} of {self._name(twice)} is named twice")
        return checked


def _one_geometry(specs: Sequence[LayerSpec]) -> LayerSpec:
    if not specs:
        raise ShapeError("a pool needs at least one linear layer")
    for i, spec in enumerate(specs):
        if spec != specs[0]:
            raise ShapeError(f"linear layer {i} is {spec}, layer 0 is {specs[0]}; a pool holds layers of one geometry")
    return specs[0]
