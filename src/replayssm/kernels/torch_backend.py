"""The torch backend: correct on every device torch has, written for the CPU. In place on states and rings."""

from __future__ import annotations

from replayssm.kernels.torch_conv import causal_conv_update
from replayssm.kernels.torch_cursor import advance_cursors, force_flush_mask, gather_cursors
from replayssm.kernels.torch_decode import packed_decode, replay_decode
from replayssm.kernels.torch_ring import flush, materialize

__all__ = [
    "advance_cursors",
    "causal_conv_update",
    "flush",
    "force_flush_mask",
    "gather_cursors",
    "materialize",
    "packed_decode",
    "replay_decode",
]
