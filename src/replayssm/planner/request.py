"""Checked options of `replayssm plan`, and the model that they are about. Needs no torch."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, get_args

from replayssm.checks import at_least, batch_sizes, dtype_name, plot_file
from replayssm.dtypes import parse_state_dtype, resolve_state_dtype
from replayssm.errors import OptionError
from replayssm.planner.checkpoints import Geometry
from replayssm.planner.estimate import KV_BYTES, Budget, Settings
from replayssm.planner.lookup import Model, find
from replayssm.spec import DEFAULT_RING_LEN, STATE_DTYPES, SpecState, check_ring_len, check_window, ring_for

SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(i?)b?|b)", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Speculation(NamedTuple):
    """Up to `drafts` drafts a step, verified by one of `strategies`; `ring_len` is that of the strategy `ring`."""

    drafts: int
    ring_len: int
    strategies: tuple[SpecState, ...]


class PlanRequest(NamedTuple):
    """What to plan. `geometry` and `weights` are one shard's; `weights` are 0 where nothing says how large they are."""

    args: argparse.Namespace
    model: Model
    geometry: Geometry
    settings: Settings
    state_dtype_source: str
    batches: tuple[int, ...]
    tp: int
    spec: Speculation | None
    weights: int
    weights_source: str
    budget: Budget | None
    plot_file: Path | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlanRequest:
        """Raises `OptionError`, `DtypeError`, `RingLengthError`, and what `lookup.find` raises."""
        ring_len = check_ring_len(DEFAULT_RING_LEN if args.ring_len is None else args.ring_len)
        io_dtype = dtype_name("--io-dtype", args.io_dtype, STATE_DTYPES)
        kv_dtype = dtype_name("--kv-dtype", args.kv_dtype, tuple(KV_BYTES))
        option = None if args.state_dtype is None else parse_state_dtype(args.state_dtype, "--state-dtype")
        batches, tp = batch_sizes(args.batch), at_least("--tp", args.tp)
        context, spec = at_least("--context", args.context, 0), _speculation(args)
        memory, weights, reserve = (_size(f"--{n}", getattr(args, n)) for n in ("memory", "weights", "reserve"))
        if memory is None and reserve:
            raise OptionError(f"--reserve {args.reserve} has no effect without --memory; add it, or drop this")
        plot = None if args.plot is None else plot_file(Path(args.plot))

        model = find(args.model)
        geometry = model.geometry.shard(tp)
        state = resolve_state_dtype(option, model.state_dtype)
        settings = Settings(ring_len, state.name, io_dtype, kv_dtype, context)
        said = model.weights_source if weights is None else "--weights"
        whole = model.weights if weights is None else weights
        share = -(-(whole or 0) // tp)
        budget = None if memory is None else Budget(memory, share, reserve or 0)
        return cls(args, model, geometry, settings, state.source, batches, tp, spec, share, said, budget, plot)


def _speculation(args: argparse.Namespace) -> Speculation | None:
    if args.spec is None:
        if args.spec_state is not None:
            raise OptionError(f"--spec-state {args.spec_state} has no effect without --spec; add it, or drop this")
        return None
    drafts = at_least("--spec", args.spec)
    known: tuple[SpecState, ...] = get_args(SpecState)
    asked = known if args.spec_state is None else tuple(part.strip() for part in args.spec_state.split(","))
    for name in asked:
        if name not in known:
            raise OptionError(f"--spec-state {name!r} is unknown; use one or more of {', '.join(known)}")
    strategies = tuple(name for name in known if name in asked)
    ring_len = ring_for(drafts + 1) if args.ring_len is None else args.ring_len
    try:
        for strategy in strategies:
            check_window(strategy, drafts, ring_len)
    except OptionError as error:
        said = str(error).replace("spec_tokens", "--spec").replace("ring_len", "--ring-len")
        raise OptionError(said) from error
    return Speculation(drafts, ring_len, strategies)


def parse_size(option: str, text: str) -> int:
    """'80GiB' is 80·2³⁰, '80GB' and '80G' are 80·10⁹ bytes; likewise k, M, T. `OptionError` without a unit or at 0."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{option} {text!r} is not a size with a unit, as in 80GiB (2^30) or 80GB (10^9 bytes each)")
    number, unit, binary = match.groups()
    size = int(Fraction(number) * (1024 if binary else 1000) ** POWERS[(unit or "").lower()])
    if size < 1:
        raise OptionError(f"{option} {text!r} is less than a byte")
    return size


def _size(option: str, text: str | None) -> int | None:
    return None if text is None else parse_size(option, text)
