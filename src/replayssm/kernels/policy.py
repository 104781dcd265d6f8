"""Replay or packed decode at this batch size: a measured table. Needs no torch.

What a launch pays for the ring does not shrink with the batch, what replay saves does. So packed decode is faster
below some number of heads, and the table says from where on replay is at least as fast.
"""

from __future__ import annotations

from typing import Literal

Route = Literal["replay", "packed"]

# Ring length -> fewest heads (rows × value heads) of a layer that decode by replay, None: packed however many. An entry
# serves all lengths up to the next one: a shorter ring folds more often, from 9 on a step pays for more records.
FromHeads = dict[int, int | None]

# Device type -> (KDA, bytes of a state element) -> FromHeads. A device that is not listed always replays.
# Each number is a batch measured from which on replay was at least level, folds included, packed and replay by the best
# kernel for each, on an H200: rings of 8 in every geometry of docs/benchmarks, others with 32 heads of 128 × 128. Other
# GPUs are served by the same numbers.
FROM_HEADS: dict[str, dict[tuple[bool, int], FromHeads]] = {
    "cuda": {
        (False, 4): {1: None, 2: 256, 17: None},
        (False, 2): {1: None, 2: 2048, 4: 512, 9: 2048, 17: None},
        (True, 4): {1: None, 2: 512, 4: 256, 9: 512, 17: None},
        (True, 2): {1: None, 2: 2048, 8: 512, 9: None},
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
        ring_len: L, at least 1.
    """
    table = FROM_HEADS.get(device_type)
    if table is None:
        return "replay"
    entry = table[is_kda, elem_bytes]
    least = entry[max(length for length in entry if length <= ring_len)]
    return "packed" if least is None or heads < least else "replay"
