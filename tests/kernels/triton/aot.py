"""Ahead-of-time compilation without a GPU: record the launches of a backend function, compile them for a target."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch(NamedTuple):
    """One kernel launch: the kernel and its bound arguments."""

    fn: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, int]


class Usage(NamedTuple):
    """Registers and spilled bytes (AMD: registers) of a thread, shared bytes of a program."""

    registers: int
    spilled: int
    shared: int


@contextmanager
def recorded(*modules: Any) -> Iterator[list[Launch]]:
    """Kernels of `modules` record their launches instead of running."""
    launches: list[Launch] = []

    def recorder(fn: Any) -> Any:
        class Recorder:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **kwargs: Any) -> None:
                    options = {k: kwargs.pop(k) for k in _OPTIONS if k in kwargs}
                    bound = dict(zip(fn.arg_names, args, strict=False)) | kwargs
                    assert bound.keys() == set(fn.arg_names), bound.keys() ^ set(fn.arg_names)
                    launches.append(Launch(fn, grid, bound, options))

                return launch

        return Recorder()

    kernels = [(m, name) for m in modules for name in vars(m) if name.endswith("_kernel")]
    saved = [getattr(m, name) for m, name in kernels]
    try:
        for (module, name), fn in zip(kernels, saved, strict=True):
            setattr(module, name, recorder(fn))
        yield launches
    finally:
        for (module, name), fn in zip(kernels, saved, strict=True):
            setattr(module, name, fn)


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """Compile as the launcher would: 1 is a constant, multiples of 16 and allocations are known to be aligned."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    fixed = {p.name for p in launch.fn.params if p.is_constexpr}
    for i, name in enumerate(launch.fn.arg_names):
        value, aligned = launch.args[name], False
        if name in fixed or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], aligned = "*" + _TYPES[value.dtype], True
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.fn, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options=dict(launch.options))


def usage(kernel: Any, target: GPUTarget) -> Usage:
    """What the binary says: `cuobjdump` on the cubin, the metadata of an AMD code object."""
    shared = kernel.metadata.shared
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        vgprs, spilled = (int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count"))
        return Usage(vgprs, spilled, shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local, shared)
