"""`replayssm env`: what decode would run on here, and why."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from replayssm import __version__
from replayssm.cli.console import human_bytes, print_json, print_table
from replayssm.dtypes import ENV_VAR, resolve_state_dtype
from replayssm.kernels.choose import backend
from replayssm.models.families import FAMILIES
from replayssm.shipped import SHIPPED

PACKAGES = {"torch": "torch", "triton": "triton", "transformers": "transformers", "tokenizers": "tokenizers"}
PACKAGES |= {"fla": "fla-core"}


def run_command(args: argparse.Namespace) -> int:
    """Print the table, or the same as JSON."""
    facts = collect()
    if args.json:
        print_json(facts, args.out)
        return 0
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        entries = value if isinstance(value, list) else [value]
        rows += [("" if i else name, str(entry)) for i, entry in enumerate(entries)]
    print_table(("", ""), rows, left=2)
    return 0


def collect() -> dict[str, str | list[str]]:
    """One entry per line of the table; a list is several lines."""
    facts: dict[str, str | list[str]] = {"replayssm": __version__, "python": platform.python_version()}
    facts |= {name: _version(package) for name, package in PACKAGES.items()}
    facts["torch"] = torch.__version__  # says which build it is, which the package's metadata may not
    facts["devices"] = _devices()
    facts["backend"] = _backend()
    facts["state dtype"] = _state_dtype()
    facts["shipped models"] = [
        f"{name}: {'in' if path.is_dir() else 'missing from'} {path}" for name, path in SHIPPED.items()
    ]
    facts["model types"] = ", ".join(FAMILIES)
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [f"cpu: {platform.machine()}, {cores} cores, {torch.get_num_threads()} torch threads"]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            found.append(f"cuda:{i}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {human_bytes(gpu.total_memory)}")
    return found


def _backend() -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        why = "a CUDA device is there"
    elif torch.version.cuda is None:
        why = "this torch is built without CUDA"
    else:
        why = "torch sees no CUDA device"
    module = backend(device)
    kernels = module.describe() if hasattr(module, "describe") else []
    return [f"{module.__name__.rpartition('.')[2]} on {device}: {why}", *kernels]


def _state_dtype() -> str:
    choice = resolve_state_dtype()
    rest = "an option overrides it"
    if choice.source == "default":
        rest = f"a model config's mamba_ssm_dtype, {ENV_VAR} or an option override it"
    return f"{choice.name} ({choice.source}); {rest}"
