"""The device to measure on, and what it and the software are called."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from replayssm import __version__
from replayssm.errors import DeviceError
from replayssm.kernels.choose import backend


def resolve(name: str | None) -> torch.device:
    """None takes a GPU where there is one. `DeviceError` when the device is unknown, absent or without a backend."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise DeviceError(f"--device {name!r} is no torch device; use cpu, cuda or cuda:1") from error
    backend(device.type)
    if device.type != "cuda":
        return torch.device(device.type)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise DeviceError(f"--device {name}: torch sees {count} CUDA devices; use --device cpu")
    return torch.device("cuda", index)


def describe(device: torch.device) -> dict[str, str | int]:
    """Name, type, size of the last-level cache that counts for the working set, and the backend."""
    module = backend(device.type)
    kernels = module.describe() if hasattr(module, "describe") else "torch"
    facts: dict[str, str | int] = {"type": str(device), "kernels": kernels}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return facts | {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "l2_bytes": gpu.L2_cache_size}
    return facts | {"name": platform.machine(), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """Of everything that can change a number; absent packages are left out."""
    found = {"replayssm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for package in ("triton", "fla-core", "sglang", "flashinfer-python", "nvidia-cutlass-dsl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
