"""Checks of command-line values that several commands share: before torch is imported, and before minutes of work."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from replayssm.dtypes import SHORT_NAMES
from replayssm.errors import DtypeError, OptionError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def at_least(option: str, value: int, least: int = 1) -> int:
    """Return `value`, or raise `OptionError` below `least`."""
    if value < least:
        raise OptionError(f"{option} {value} is below {least}")
    return value


def batch_sizes(text: str) -> tuple[int, ...]:
    """'1,8,64' of --batch, each size once."""
    found = []
    for part in text.split(","):
        if not part.strip().lstrip("-").isdecimal():
            raise OptionError(f"--batch {text!r}: {part.strip()!r} is not a whole number; as in --batch 1,8,64")
        found.append(at_least("--batch", int(part)))
    return tuple(dict.fromkeys(found))


def dtype_name(option: str, text: str, allowed: tuple[str, ...]) -> str:
    """A dtype by its full, short or torch name. Raises `DtypeError` outside `allowed`."""
    name = text.strip().lower().removeprefix("torch.")
    name = {**SHORT_NAMES, "fp8": "float8"}.get(name, name)
    if name not in allowed:
        raise DtypeError.unsupported(option, text, allowed)
    return name


def needs_matplotlib(option: str) -> None:
    """Raise `OptionError` when there is no matplotlib for what `option` asks."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(f"{option} needs matplotlib: pip install 'replayssm[bench]'")


def plot_file(path: Path) -> Path:
    """The file of --plot."""
    needs_matplotlib("--plot")
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise OptionError(f"--plot {path}: the name must end with one of {', '.join(PLOT_SUFFIXES)}")
    return writable("--plot", path)


def writable(option: str, path: Path) -> Path:
    """A file that can be written."""
    if path.is_dir():
        raise OptionError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"{option} {path} cannot be written: permission denied")
    return path
