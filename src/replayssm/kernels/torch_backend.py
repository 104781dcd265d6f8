"""The torch backend: correct on every device torch has, written for the CPU. In place on states and rings."""

from __future__ import annotations

from replayssm.kernels.torch_commit import causal_conv_verify, commit_conv, commit_cursors, commit_snapshot
from replayssm.kernels.torch_conv import causal_conv_update
from replayssm.kernels.torch_cursor import advance_cursors, force_flush_mask, gather_cursors
from replayssm.kernels.torch_decode import packed_decode, replay_decode
from replayssm.kernels.torch_ring import flush, materialize
from replayssm.kernels.torch_verify import replay_verify
from replayssm.kernels.torch_verify_packed import commit_kv_replay, packed_verify

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
