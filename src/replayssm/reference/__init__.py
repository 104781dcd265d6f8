"""The mathematics in plain torch: slow, short, float64. The oracle of every test; it imports no kernel and no op.

All functions return new tensors. Arithmetic runs in float64 unless `dtype` says otherwise; pools come back in the
dtype they came in, so a rounding state can be followed as well. Formulas: docs/mathematics.md.
"""

from __future__ import annotations

from replayssm.reference.conv import causal_conv_update, causal_conv_verify, commit_conv
from replayssm.reference.gates import beta, gdn_log_decay, kda_log_decay, l2norm
from replayssm.reference.packed import packed_decode
from replayssm.reference.replay import advance_cursor, flush, force_flush, materialize, replay_decode
from replayssm.reference.serial import serial
from replayssm.reference.verify import commit, commit_cursor, flushes_early, ring_verify, verify

__all__ = [
    "advance_cursor",
    "beta",
    "causal_conv_update",
    "causal_conv_verify",
    "commit",
    "commit_conv",
    "commit_cursor",
    "flush",
    "flushes_early",
    "force_flush",
    "gdn_log_decay",
    "kda_log_decay",
    "l2norm",
    "materialize",
    "packed_decode",
    "replay_decode",
    "ring_verify",
    "serial",
    "verify",
]
