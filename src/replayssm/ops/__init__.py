"""Public operations: validate, choose a backend, launch. All work in place on caller-owned pools.

A step of a model with replay: `gather_cursors`, then for each layer `causal_conv_update` and `gdn_decode` or
`kda_decode`, and once at the end `advance_cursors`. Where states are to be snapshot at known lengths,
`force_flush_mask` goes first. Whoever reads a state outside decode first calls `flush` or `materialize`. Where batches
are small, `decode_route` says whether packed decode is the faster one.

A step that checks drafts: `gather_cursors`, then for each layer `causal_conv_verify` and `gdn_verify` or `kda_verify`,
and when it is known what is kept, `commit_cursors` and `commit_conv`. Other ways to roll back: see `verify`, `commit`.
"""

from __future__ import annotations

from replayssm.ops.commit import commit_conv, commit_cursors, commit_fold, commit_kv_replay, commit_snapshot
from replayssm.ops.conv import causal_conv_update
from replayssm.ops.conv_verify import causal_conv_verify
from replayssm.ops.debug import debug_checks
from replayssm.ops.decode import (
    fused_recurrent_linear_packed_decode,
    fused_recurrent_linear_replayssm_decode,
    gdn_decode,
    gdn_packed_decode,
    kda_decode,
    kda_packed_decode,
)
from replayssm.ops.policy import decode_route
from replayssm.ops.ring import advance_cursors, flush, force_flush_mask, gather_cursors, materialize
from replayssm.ops.traffic import TrafficCounter, count_traffic
from replayssm.ops.verify import (
    fused_recurrent_linear_packed_verify,
    fused_recurrent_linear_replayssm_verify,
    gdn_verify,
    kda_verify,
)

__all__ = [
    "TrafficCounter",
    "advance_cursors",
    "causal_conv_update",
    "causal_conv_verify",
    "commit_conv",
    "commit_cursors",
    "commit_fold",
    "commit_kv_replay",
    "commit_snapshot",
    "count_traffic",
    "debug_checks",
    "decode_route",
    "flush",
    "force_flush_mask",
    "fused_recurrent_linear_packed_decode",
    "fused_recurrent_linear_packed_verify",
    "fused_recurrent_linear_replayssm_decode",
    "fused_recurrent_linear_replayssm_verify",
    "gather_cursors",
    "gdn_decode",
    "gdn_packed_decode",
    "gdn_verify",
    "kda_decode",
    "kda_packed_decode",
    "kda_verify",
    "materialize",
]
