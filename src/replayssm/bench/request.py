"""Checked options of `replayssm bench decode`: everything that can be refused before torch is imported."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import NamedTuple

from replayssm.bench import geometry
from replayssm.checks import batch_sizes, dtype_name, plot_file, writable
from replayssm.dtypes import parse_state_dtype
from replayssm.errors import OptionError
from replayssm.spec import STATE_DTYPES, LayerSpec, check_ring_len

BATCHES = (1, 8, 64, 256)
QUICK_BATCHES = (1, 8)


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
            writable("--json", Path(args.json_file))
        plot = None if args.plot is None else plot_file(Path(args.plot))
        usual = QUICK_BATCHES if args.quick else BATCHES
        batches = usual if args.batch is None else batch_sizes(args.batch)
        io_dtype = dtype_name("--io-dtype", args.io_dtype, STATE_DTYPES)
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
