"""From the host to a device: small tensors, without waiting for it, and which device is the current one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of Python numbers on `device`. From pageable memory a copy to a GPU would wait; this one is pinned."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, for what follows streams, events and memory counters. Nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
