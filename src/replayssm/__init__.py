"""Replay decode for hybrid linear-attention language models: read the recurrent state, do not write it.

The names below load on first use, so `import replayssm` stays fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from replayssm.errors import ReplayError
from replayssm.spec import LayerSpec

if TYPE_CHECKING:
    from replayssm.engine.llm import LLM, AsyncLLM
    from replayssm.engine.params import SamplingParams
    from replayssm.models.cache import ReplayCache
    from replayssm.models.enable import disable, enable, patch
    from replayssm.models.loading import load_model

__version__ = "0.1.0"

_LAZY = {
    "AsyncLLM": "replayssm.engine.llm",
    "LLM": "replayssm.engine.llm",
    "SamplingParams": "replayssm.engine.params",
    "ReplayCache": "replayssm.models.cache",
    "disable": "replayssm.models.enable",
    "enable": "replayssm.models.enable",
    "patch": "replayssm.models.enable",
    "load_model": "replayssm.models.loading",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "LayerSpec",
    "ReplayCache",
    "ReplayError",
    "SamplingParams",
    "__version__",
    "disable",
    "enable",
    "load_model",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'replayssm' has no attribute {name!r}")
