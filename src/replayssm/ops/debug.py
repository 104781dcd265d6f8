"""Checks of index *values*, which have to read them.

Bounds are checked on the CPU always, where reading is free. Bounds elsewhere, and what compares rows with each other,
only with REPLAYSSM_DEBUG=1 or after `debug_checks(True)`.
"""

from __future__ import annotations

import os
from collections import Counter

from torch import Tensor

from replayssm.errors import SlotError

_enabled = os.environ.get("REPLAYSSM_DEBUG", "") not in ("", "0")


def debug_checks(enabled: bool) -> bool:
    """Switch the checks on or off; returns what was set before."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


def check_slots(name: str, indices: Tensor, slots: int, distinct: bool = True) -> None:
    """Live entries of `indices` lie in 0 … slots-1 and are distinct (unless they may repeat), else `SlotError`."""
    if not _enabled and (indices.device.type != "cpu" or not len(indices) or int(indices.max()) < slots):
        return
    live = [i for i in indices.tolist() if i >= 0]
    outside = sorted({i for i in live if i >= slots})
    if outside:
        raise SlotError(f"{name} names slots {outside}, but the pool has {slots} (0…{slots - 1}); -1 marks padding")
    twice = sorted(i for i, count in Counter(live).items() if count > 1)
    if distinct and twice:
        raise SlotError(f"{name} names slots {twice} more than once; a slot may serve one row of a batch")


def check_write_pos(write_pos: Tensor, indices: Tensor, ring_len: int, full: bool = False) -> None:
    """Cursors of live rows lie in 0 … L-1 (0 … L where a full ring is allowed), else `SlotError`."""
    high = ring_len if full else ring_len - 1
    if not _enabled:
        if write_pos.device.type != "cpu" or not len(write_pos):
            return
        low, top = write_pos.aminmax()
        if int(low) >= 0 and int(top) <= high:
            return
    pairs = zip(indices.tolist(), write_pos.tolist(), strict=True)
    bad = [f"{pos} (slot {slot})" for slot, pos in pairs if slot >= 0 and not 0 <= pos <= high]
    if bad:
        raise SlotError(f"write_pos holds {', '.join(bad)}, but a ring of length {ring_len} allows 0…{high}")


def check_counts(name: str, counts: Tensor, indices: Tensor, limit: int, what: str) -> None:
    """Tokens of live rows are 0 … limit, else `SlotError`; `what` is the name of the limit."""
    if not _enabled:
        if counts.device.type != "cpu" or not len(counts):
            return
        low, top = counts.aminmax()
        if int(low) >= 0 and int(top) <= limit:
            return
    pairs = zip(indices.tolist(), counts.tolist(), strict=True)
    bad = [f"{count} (slot {slot})" for slot, count in pairs if slot >= 0 and not 0 <= count <= limit]
    if bad:
        raise SlotError(f"{name} holds {', '.join(bad)}, but {what} = {limit} allows 0…{limit}")


def check_accepted(accepted: Tensor, indices: Tensor, lengths: Tensor) -> None:
    """Live rows keep at least 0 and at most all of their tokens, else `SlotError`."""
    if not _enabled and accepted.device.type != "cpu":
        return
    rows = zip(indices.tolist(), accepted.tolist(), lengths.tolist(), strict=True)
    bad = [f"{kept} of {length} (slot {slot})" for slot, kept, length in rows if slot >= 0 and not 0 <= kept <= length]
    if bad:
        raise SlotError(f"accepted holds {', '.join(bad)}; a row keeps 0 tokens up to its length")


def check_disjoint(src: Tensor, dst: Tensor) -> None:
    """No slot of one pool is both source and destination, else `SlotError`."""
    if not _enabled:
        return
    both = sorted({i for i in src.tolist() if i >= 0} & {i for i in dst.tolist() if i >= 0})
    if both:
        raise SlotError(f"slots {both} are both source and destination; copy through a free slot instead")
