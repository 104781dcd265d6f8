"""The backend of CUDA devices: explicit-layout kernels where they apply, else portable ones, else torch.

Decode, verify and flush have explicit-layout kernels. The other operations are bound by few bytes in any layout, so
they take the portable kernels. With Triton nothing here reads the device, and a CUDA graph can hold every operation.

All kernels share one ring format: d fp32, raw k in the activation dtype, per-step log decay floored at -200. Which
ones a call takes where better ones exist, and why, is logged once per reason.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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

logger = logging.getLogger(__name__)


def replay_decode(mixed_qkv: Tensor, *args: Any) -> None:
    """See `torch_decode.replay_decode`: same arguments."""
    _kernels(args[5]).replay_decode(mixed_qkv, *args)


def packed_decode(mixed_qkv: Tensor, *args: Any) -> None:
    """See `torch_decode.packed_decode`: same arguments."""
    _kernels(args[5]).packed_decode(mixed_qkv, *args)


def flush(initial_state: Tensor, *args: Any) -> None:
    """See `torch_ring.flush`: same arguments."""
    _kernels(initial_state).flush(initial_state, *args)


def materialize(*args: Any) -> None:
    """See `torch_ring.materialize`: same arguments."""
    _portable().materialize(*args)


def causal_conv_update(*args: Any) -> None:
    """See `torch_conv.causal_conv_update`: same arguments."""
    _portable().causal_conv_update(*args)


def advance_cursors(*args: Any) -> None:
    """See `torch_cursor.advance_cursors`: same arguments."""
    _portable().advance_cursors(*args)


def gather_cursors(*args: Any) -> Tensor:
    """See `torch_cursor.gather_cursors`: same arguments."""
    result: Tensor = _portable().gather_cursors(*args)
    return result


def force_flush_mask(*args: Any) -> None:
    """See `torch_cursor.force_flush_mask`: same arguments."""
    _portable().force_flush_mask(*args)


def replay_verify(mixed_qkv: Tensor, *args: Any) -> None:
    """See `torch_verify.replay_verify`: same arguments."""
    state, d_cache, out = args[5], args[6], args[9]
    gluon, portable, why = _modules()
    if gluon is not None:
        why = gluon.supports(state) or gluon.verifies(state, mixed_qkv, out, d_cache.shape[2])
        if why is None:
            gluon.replay_verify(mixed_qkv, *args)
            return
    chosen = portable or _torch()
    _say(_WINDOWS, chosen.__name__, why)
    chosen.replay_verify(mixed_qkv, *args)


def packed_verify(*args: Any) -> None:
    """See `torch_verify_packed.packed_verify`: same arguments."""
    _portable().packed_verify(*args)


def causal_conv_verify(*args: Any) -> None:
    """See `torch_commit.causal_conv_verify`: same arguments."""
    _portable().causal_conv_verify(*args)


def commit_cursors(*args: Any) -> None:
    """See `torch_commit.commit_cursors`: same arguments."""
    _portable().commit_cursors(*args)


def commit_conv(*args: Any) -> None:
    """See `torch_commit.commit_conv`: same arguments."""
    _portable().commit_conv(*args)


def commit_snapshot(*args: Any) -> None:
    """See `torch_commit.commit_snapshot`: same arguments."""
    _portable().commit_snapshot(*args)


def commit_kv_replay(*args: Any) -> None:
    """See `torch_verify_packed.commit_kv_replay`: same arguments."""
    _portable().commit_kv_replay(*args)


_SOME = "decode and flush"
_WINDOWS = "verify on a ring"
_REST = "conv update, materialize and cursors"


def _kernels(initial_state: Tensor) -> ModuleType:
    """What takes a decode or a flush."""
    gluon, portable, why = _modules()
    if gluon is not None:
        why = gluon.supports(initial_state)
        if why is None:
            return gluon
    chosen = portable or _torch()
    _say(_SOME, chosen.__name__, why)
    return chosen


def _portable() -> ModuleType:
    """What takes any other operation."""
    _, portable, why = _modules()
    if portable is None:
        portable = _torch()
        _say(_REST, portable.__name__, why)
    return portable


@cache
def _modules() -> tuple[ModuleType | None, ModuleType | None, str]:
    """Gluon kernels, portable kernels (None where they cannot be imported), and the reason why not."""
    gluon: ModuleType | None = None
    portable: ModuleType | None = None
    reason = ""
    try:
        from replayssm.kernels.triton import backend as portable
    except ImportError as error:
        reason = f"Triton cannot be imported ({error}); pip install 'replayssm[gpu]'"
    else:
        try:
            from replayssm.kernels.gluon import backend as gluon
        except (ImportError, AttributeError) as error:
            reason = f"this Triton lacks what the explicit-layout kernels need ({error})"
    return gluon, portable, reason


def describe() -> list[str]:
    """Which kernels each operation takes here and why not others, a line for each case. For `replayssm env`."""
    gluon, portable, why = _modules()
    if portable is None:
        return [f"{_SOME}, {_REST}: torch, which waits for the GPU; {why}"]
    rest = f"{_REST}: triton; gluon has none of them"
    if gluon is None:
        return [f"{_SOME}: triton; no gluon, {why}", rest]
    lines = []
    for i in range(torch.cuda.device_count()):
        try:
            usual, odd = (torch.empty(1, 1, v, k, device=f"cuda:{i}") for v, k in ((128, 128), (7, 33)))
        except RuntimeError as error:  # a device that is full or broken, which is when one asks
            lines.append(f"cuda:{i} cannot be used: {str(error).partition(chr(10))[0]}")
            continue
        refusal = gluon.supports(usual)
        if refusal is None:
            line = f"gluon, or triton where gluon has no kernel (such as {gluon.supports(odd)})"
        else:
            line = f"triton; no gluon, {refusal}"
        lines.append(f"{_SOME} on cuda:{i}: {line}")
    return [*lines, rest]


def _torch() -> ModuleType:
    from replayssm.kernels import torch_backend

    return torch_backend


@cache
def _say(operations: str, name: str, why: str | None) -> None:
    logger.info("%s: %s, since %s", operations, name, why)
