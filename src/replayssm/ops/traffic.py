"""Count the bytes that decode must move, from the cursors and flush decisions of the calls that really ran.

    with count_traffic() as traffic:
        model.generate(...)
    print(traffic.totals())

Only what the algorithm needs is counted: the states and the valid records of live rows. Activations, weights and
whatever a backend reads beyond that are not. Counters live on the device of the call and are summed only by
`totals()`. The operations count from inside the registered op, so compiled graphs are counted too. A replayed CUDA
graph runs no Python; it is counted if it was captured inside the block, after some call had run there, so that the
counters were there to be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Totals(NamedTuple):
    """Bytes of state and ring; rows, appends and flushes are row × layer counts."""

    state_read: int
    state_written: int
    ring_read: int
    ring_written: int
    rows: int
    appends: int
    flushes: int


class TrafficCounter:
    """Accumulators of one `count_traffic` block.

    `rows` counts live rows of decode steps, `appends` records written, `flushes` ring folds into a checkpoint
    (`flush` with an empty ring is none; packed decode is none).
    """

    def __init__(self) -> None:
        self._sums: dict[torch.device, Tensor] = {}

    def add(self, device: torch.device, values: list[Tensor | int]) -> None:
        """Add one value per field of `Totals`, without reading the device or copying to it."""
        if device not in self._sums:
            self._sums[device] = torch.zeros(len(Totals._fields), dtype=torch.int64, device=device)
        sums = self._sums[device]
        sums += torch.stack([v if isinstance(v, Tensor) else sums.new_full((), v) for v in values])

    def totals(self) -> Totals:
        """Sums over all devices, as integers. Waits for the devices."""
        sums = [s.tolist() for s in self._sums.values()]
        return Totals(*(sum(column) for column in zip([0] * len(Totals._fields), *sums, strict=True)))


_active: list[TrafficCounter] = []


@contextmanager
def count_traffic() -> Iterator[TrafficCounter]:
    """Count every call of the process until the block ends. Blocks may be nested; each counts for itself."""
    counter = TrafficCounter()
    _active.append(counter)
    try:
        yield counter
    finally:
        _active[:] = [c for c in _active if c is not counter]


def active() -> bool:
    """Whether a block is open."""
    return bool(_active)


def state_bytes(state: Tensor) -> int:
    """Bytes of one slot of [slots, HV, V, K], all layers of [layers, slots, HV, V, K]."""
    layers = state.shape[0] if state.ndim == 5 else 1
    return layers * state.shape[-3] * state.shape[-2] * state.shape[-1] * state.element_size()


def record_bytes(d_cache: Tensor, k_cache: Tensor, g_cache: Tensor) -> int:
    """Bytes of one record (d, k, g) of one slot, all layers of layered caches."""
    total = 0
    layered = d_cache.ndim == 5
    for cache in (d_cache, k_cache, g_cache):
        size = cache.element_size() * (cache.shape[0] if layered else 1)
        heads, _ring_len, *inner = cache.shape[2 if layered else 1 :]
        for extent in (heads, *inner):
            size *= extent
        total += size
    return total


def note_replay(
    state: Tensor, ring: tuple[Tensor, Tensor, Tensor], indices: Tensor, write_pos: Tensor, force_flush: Tensor | None
) -> None:
    """A replay decode step."""
    live = indices >= 0
    flush = write_pos == ring[0].shape[2] - 1
    if force_flush is not None:
        flush = flush | (force_flush != 0)
    rows, flushes = live.sum(), (flush & live).sum()
    size, record = state_bytes(state), record_bytes(*ring)
    read = _records(live, write_pos)
    appends = rows - flushes
    _add(indices.device, [rows * size, flushes * size, read * record, appends * record, rows, appends, flushes])


def note_packed(state: Tensor, indices: Tensor) -> None:
    """A packed decode step."""
    rows = (indices >= 0).sum()
    size = state_bytes(state)
    _add(indices.device, [rows * size, rows * size, 0, 0, rows, 0, 0])


def note_verify(
    state: Tensor,
    ring: tuple[Tensor, Tensor, Tensor],
    indices: Tensor,
    write_pos: Tensor,
    lengths: Tensor,
    force_flush: Tensor | None,
) -> None:
    """A window on a ring: every token of a live row leaves a record; an empty ring has nothing to fold."""
    live = indices >= 0
    flush = write_pos + lengths >= ring[0].shape[2]
    if force_flush is not None:
        flush = flush | (force_flush != 0)
    rows, flushes = live.sum(), (flush & live & (write_pos > 0)).sum()
    size, record = state_bytes(state), record_bytes(*ring)
    read, written = _records(live, write_pos), _records(live, lengths)
    _add(indices.device, [rows * size, flushes * size, read * record, written * record, rows, written, flushes])


def note_packed_verify(state: Tensor, indices: Tensor, snapshots: Tensor | None) -> None:
    """A window on states that stay; `snapshots`: how many states each row writes beside its own."""
    live = indices >= 0
    rows, size = live.sum(), state_bytes(state)
    written = 0 if snapshots is None else _records(live, snapshots) * size
    _add(indices.device, [rows * size, written, 0, 0, rows, 0, 0])


def note_commit(state: Tensor, indices: Tensor, accepted: Tensor) -> None:
    """A state is read, its own or a snapshot, and written, in rows that keep something."""
    size = ((indices >= 0) & (accepted > 0)).sum() * state_bytes(state)
    _add(indices.device, [size, size, 0, 0, 0, 0, 0])


def note_flush(state: Tensor, ring: tuple[Tensor, Tensor, Tensor], indices: Tensor, write_pos: Tensor) -> None:
    """A flush outside decode; rows with an empty ring move nothing."""
    layers = state.shape[0] if state.ndim == 5 else 1
    live = (indices >= 0) & (write_pos > 0)
    rows = live.sum()
    size, record = state_bytes(state), record_bytes(*ring)
    read = _records(live, write_pos)
    _add(indices.device, [rows * size, rows * size, read * record, 0, 0, 0, rows * layers])


def note_materialize(
    state: Tensor,
    ring: tuple[Tensor, Tensor, Tensor],
    src: Tensor,
    write_pos: Tensor,
    dst_state: Tensor,
    dst: Tensor,
) -> None:
    """A folded copy: the source is read whole, the destination written whole."""
    live = (src >= 0) & (dst >= 0)
    rows = live.sum()
    read = _records(live, write_pos)
    sizes = rows * state_bytes(state), rows * state_bytes(dst_state), read * record_bytes(*ring)
    _add(src.device, [*sizes, 0, 0, 0, 0])


def _records(live: Tensor, write_pos: Tensor) -> Tensor:
    """Sum over the live rows, of records mostly. A product, since torch.where would copy its scalar from the host."""
    return (write_pos * live).sum()


def _add(device: torch.device, values: list[Tensor | int]) -> None:
    for counter in _active:
        counter.add(device, values)
