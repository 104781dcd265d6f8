"""Replay or packed decode at this batch size: a measured table. Needs no torch.

What a launch pays for the ring does not shrink with the batch, what replay saves does. So packed decode is faster
below some number of heads, and the table says from where on replay is at least as fast.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Route = Literal["replay", "packed"]

SHORT_RING = 8


class FromHeads(NamedTuple):
    """Fewest heads (rows × value heads) of a layer that decode by replay; None: however many, packed."""

    short: int | None  # rings of up to SHORT_RING
    long: int | None  # longer rings


# Device type -> (KDA, bytes of a state element) -> heads. A device that is not listed always replays.
# Each number is the smallest batch measured at which replay won: K = V = 128, 32 value heads, rings of 8 and 16,
# folds included, packed and replay by the best kernel for each, on an H200. Other GPUs are served by the same numbers.
FROM_HEADS: dict[str, dict[tuple[bool, int], FromHeads]] = {
    "cuda": {
        (False, 4): FromHeads(short=256, long=512),
        (False, 2): FromHeads(short=256, long=2048),
        (True, 4): FromHeads(short=256, long=2048),
        (True, 2): FromHeads(short=512, long=None),
    },
}


def decode_route(device_type: str, is_kda: bool, elem_bytes: int, heads: int, ring_len: int) -> Route:
    """Which decode is the faster one.

    On a CPU it is replay always: the torch backend is there to count bytes, and replay moves fewer at any batch size.

    Args:
        device_type: of the state, as in `torch.device.type`.
        is_kda: decay per key channel instead of per head.
        elem_bytes: of one element of the state, 4 or 2.
        heads: rows × value heads of one launch.
        ring_len: L.
    """
    table = FROM_HEADS.get(device_type)
    if table is None:
        return "replay"
    entry = table[is_kda, elem_bytes]
    least = entry.short if ring_len <= SHORT_RING else entry.long
    return "packed" if least is None or heads < least else "replay"
