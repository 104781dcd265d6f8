"""Kernels of other packages, for comparison at equal work. Each is checked like ours before it is timed.

A further peer is one entry in `PEERS`, see `Peer`. They are looked for where Python looks for any package; one that is
not installed is skipped with its reason.
"""

from __future__ import annotations

from replayssm.bench.peers import fla, flashinfer, sglang
from replayssm.bench.peers.peer import Peer

PEERS: list[Peer] = [*fla.PEERS, *sglang.PEERS, *flashinfer.PEERS]

__all__ = ["PEERS", "Peer"]
