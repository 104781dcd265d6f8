"""The backend of CUDA devices: explicit-layout kernels where they apply, else portable ones, else torch.

Decode and flush have kernels of their own; the remaining operations run in torch. All three share one ring format:
d fp32, raw k in the activation dtype, per-step log decay floored at -200. Which kernels a call takes, and why not
faster ones, is logged once per reason.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor

from replayssm.kernels.torch_backend import advance_cursors, causal_conv_update, gather_cursors, materialize

__all__ = [
    "advance_cursors",
    "causal_conv_update",
    "flush",
    "gather_cursors",
    "materialize",
    "packed_decode",
    "replay_decode",
]

logger = logging.getLogger(__name__)


def replay_decode(mixed_qkv: Tensor, *args: Any) -> None:
    """See `torch_decode.replay_decode`: same arguments."""
    initial_state, d_cache = args[5], args[6]
    _kernels(initial_state, mixed_qkv, d_cache).replay_decode(mixed_qkv, *args)


def packed_decode(mixed_qkv: Tensor, *args: Any) -> None:
    """See `torch_decode.packed_decode`: same arguments."""
    _kernels(args[5], mixed_qkv, None).packed_decode(mixed_qkv, *args)


def flush(initial_state: Tensor, d_cache: Tensor, k_cache: Tensor, *args: Any) -> None:
    """See `torch_ring.flush`: same arguments."""
    _kernels(initial_state, k_cache, d_cache).flush(initial_state, d_cache, k_cache, *args)


def _kernels(initial_state: Tensor, activations: Tensor, d_cache: Tensor | None) -> ModuleType:
    gluon, portable, why = _modules()
    if gluon is not None:
        why = gluon.supports(initial_state, activations, d_cache)
        if why is None:
            return gluon
    chosen = portable or _torch()
    _say(chosen.__name__, why)
    return chosen


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


def describe() -> str:
    """Which kernels there are, for `replayssm env`."""
    gluon, portable, reason = _modules()
    found = [name for name, module in (("gluon", gluon), ("triton", portable)) if module is not None]
    return f"decode and flush: {', '.join([*found, 'torch'])} (first that applies)" + (f"; {reason}" if reason else "")


def _torch() -> ModuleType:
    from replayssm.kernels import torch_backend

    return torch_backend


@cache
def _say(name: str, why: str | None) -> None:
    logger.info("decode uses %s: %s", name, why)
