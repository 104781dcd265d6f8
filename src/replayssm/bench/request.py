"""Checked options of `replayssm bench decode`: everything that can be refused before torch is imported."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from replayssm.bench import geometry
from replayssm.dtypes import SHORT_NAMES, parse_state_dtype
from replayssm.errors import DtypeError, OptionError
from replayssm.spec import STATE_DTYPES, LayerSpec, check_ring_len

BATCHES = (1, 8, 64, 256)
QUICK_BATCHES = (1, 8)
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


OPTIONS = ("model", "kind", "heads", "dims", "batch", "ring_len", "state_dtype", "io_dtype", "device", "plot")


class BenchRequest(NamedTuple):
    """What to measure; `args` holds the plain switches, `name` is for people."""

    args: argparse.Namespace
    name: str
    spec: LayerSpec
    batches: tuple[int, ...]
    ring_len: int
    state_dtypes: tuple[str, ...]
    io_dtype: str
    device: str | None
    quick: bool
    json_file: str | None
    plot_file: Path | None

    @property
    def command(self) -> str:
        """The command line that gives this request, defaults written out."""
        words = ["replayssm", "bench", "decode", *(["--quick"] if self.quick else [])]
        for name, value in (*((n, getattr(self.args, n)) for n in OPTIONS), ("json", self.json_file)):
            words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchRequest:
        """Raises `OptionError`, `ShapeError`, `DtypeError` or `RingLengthError`.

        `args.json` becomes what the other commands mean by it: only JSON goes to standard output.
        """
        args.json = args.json_file == "-"
        name, spec = _layer(args)
        check_ring_len(args.ring_len)
        states = tuple(dict.fromkeys(parse_state_dtype(d, "--state-dtype") for d in args.state_dtype.split(",")))
        if args.json_file is not None and not args.json:
            _writable("--json", Path(args.json_file))
        plot = None if args.plot is None else _plot(Path(args.plot))
        batches = _batches(args.batch, args.quick)
        io_dtype = _io_dtype(args.io_dtype)
        return cls(
            args, name, spec, batches, args.ring_len, states, io_dtype, args.device, args.quick, args.json_file, plot
        )


def _layer(args: argparse.Namespace) -> tuple[str, LayerSpec]:
    if args.model is not None:
        for option in ("kind", "heads", "dims"):
            if getattr(args, option) is not None:
                raise OptionError(f"--model {args.model} says what --{option} says; give one of the two")
        name, found = geometry.find(args.model)
        return name, found.spec
    kind = args.kind or "gdn"
    if kind not in geometry.DEFAULT_HEADS:
        raise OptionError(f"--kind {kind!r} is unknown; use gdn or kda")
    heads = _pair("--heads", args.heads) if args.heads is not None else geometry.DEFAULT_HEADS[kind]
    dims = _pair("--dims", args.dims) if args.dims is not None else geometry.DEFAULT_DIMS
    return f"{kind} {heads[0]}/{heads[1]} heads, {dims[0]}/{dims[1]}", LayerSpec(kind, *heads, *dims)


def _pair(option: str, text: str) -> tuple[int, int]:
    """'16/32' or '32', which is '32/32'."""
    parts = text.split("/")
    if len(parts) > 2 or not all(p.strip().isdecimal() for p in parts):
        raise OptionError(f"{option} {text!r} is not one or two whole numbers, as in {option} 16/32")
    return int(parts[0]), int(parts[-1])


def _batches(text: str | None, quick: bool) -> tuple[int, ...]:
    if text is None:
        return QUICK_BATCHES if quick else BATCHES
    result = []
    for part in text.split(","):
        if not part.strip().lstrip("-").isdecimal():
            raise OptionError(f"--batch {text!r}: {part.strip()!r} is not a whole number; as in --batch 1,8,64")
        if int(part) < 1:
            raise OptionError(f"--batch {int(part)} is below 1")
        result.append(int(part))
    return tuple(dict.fromkeys(result))


def _io_dtype(text: str) -> str:
    name = text.strip().lower().removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    if name not in STATE_DTYPES:
        raise DtypeError.unsupported("--io-dtype", text, STATE_DTYPES)
    return name


def _plot(path: Path) -> Path:
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install 'replayssm[bench]'")
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise OptionError(f"--plot {path}: the name must end with one of {', '.join(PLOT_SUFFIXES)}")
    _writable("--plot", path)
    return path


def _writable(option: str, path: Path) -> None:
    """Refuse before minutes of measuring what could not be saved afterwards."""
    if path.is_dir():
        raise OptionError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"{option} {path} cannot be written: permission denied")
