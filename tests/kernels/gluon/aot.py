"""Launches of the Gluon backend, compiled by Triton's own launch path for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@contextmanager
def compiled(backend: Any, arch: int) -> Iterator[list[Any]]:
    """Launches compile for a compute capability (90 for 9.0) instead of running; what they gave is in the list."""
    kernels: list[Any] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(launch(self, *args, grid=grid, warmup=True, **options))

    absent = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,  # the key of Triton's cache, so each target has its own
        get_current_stream=lambda device=None: 0,
    )
    with (
        patch.object(type(driver), "active", absent),
        patch.object(JITFunction, "run", run),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(backend, "multiprocessors", lambda device: 132),
    ):
        yield kernels
