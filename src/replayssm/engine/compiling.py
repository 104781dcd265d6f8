"""torch.compile for functions that are compiled once for each of many shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SHAPES = 1024  # of one function in a process; dynamo's own limit of 8 is less than one engine has batch buckets


def compile_shapes(function: Callable[..., Any], dynamic: bool) -> Any:
    """`function` compiled, for any number of shapes.

    Beyond dynamo's limits it would run as it is, which for flex attention is all scores in memory, and no graph.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, SHAPES)
    return torch.compile(function, dynamic=dynamic)
