"""The functions every backend offers, on Triton. In place on states and rings; nothing here reads the device."""

from __future__ import annotations

from replayssm.kernels.triton.commit import causal_conv_verify, commit_conv, commit_cursors, commit_snapshot
from replayssm.kernels.triton.conv import causal_conv_update
from replayssm.kernels.triton.cursor import advance_cursors, force_flush_mask, gather_cursors
from replayssm.kernels.triton.fold import flush, materialize
from replayssm.kernels.triton.packed import packed_decode
from replayssm.kernels.triton.replay import replay_decode
from replayssm.kernels.triton.window import commit_kv_replay, packed_verify, replay_verify

__all__ = [
    "advance_cursors",
    "causal_conv_update",
    "causal_conv_verify",
    "commit_conv",
    "commit_cursors",
    "commit_kv_replay",
    "commit_snapshot",
    "flush",
    "force_flush_mask",
    "gather_cursors",
    "materialize",
    "packed_decode",
    "packed_verify",
    "replay_decode",
    "replay_verify",
]
