"""Checked options of `replayssm plan`, and the model that they are about. Needs no torch."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from replayssm.checks import at_least, batch_sizes, dtype_name, plot_file
from replayssm.dtypes import parse_state_dtype, resolve_state_dtype
from replayssm.errors import OptionError
from replayssm.planner.checkpoints import Geometry
from replayssm.planner.estimate import KV_BYTES, Budget, Settings
from replayssm.planner.lookup import Model, find
from replayssm.spec import STATE_DTYPES, check_ring_len

SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(i?)b?|b)", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class PlanRequest(NamedTuple):
    """What to plan. `geometry` and `weights` are one shard's; `weights` are 0 where nothing says how large they are."""

    args: argparse.Namespace
    model: Model
    geometry: Geometry
    settings: Settings
    state_dtype_source: str
    batches: tuple[int, ...]
    tp: int
    draft_tokens: int
    weights: int
    weights_source: str
    budget: Budget | None
    plot_file: Path | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlanRequest:
        """Raises `OptionError`, `DtypeError`, `RingLengthError`, and what `lookup.find` raises."""
        check_ring_len(args.ring_len)
        io_dtype = dtype_name("--io-dtype", args.io_dtype, STATE_DTYPES)
        kv_dtype = dtype_name("--kv-dtype", args.kv_dtype, tuple(KV_BYTES))
        option = None if args.state_dtype is None else parse_state_dtype(args.state_dtype, "--state-dtype")
        batches, tp = batch_sizes(args.batch), at_least("--tp", args.tp)
        context, draft = at_least("--context", args.context, 0), at_least("--draft-tokens", args.draft_tokens, 0)
        memory, weights, reserve = (_size(f"--{n}", getattr(args, n)) for n in ("memory", "weights", "reserve"))
        if memory is None and (draft or reserve):
            name, value = ("draft-tokens", draft) if draft else ("reserve", args.reserve)
            raise OptionError(f"--{name} {value} has no effect without --memory; add it, or drop this")
        plot = None if args.plot is None else plot_file(Path(args.plot))

        model = find(args.model)
        geometry = model.geometry.shard(tp)
        state = resolve_state_dtype(option, model.state_dtype)
        settings = Settings(args.ring_len, state.name, io_dtype, kv_dtype, context)
        said = model.weights_source if weights is None else "--weights"
        whole = model.weights if weights is None else weights
        share = -(-(whole or 0) // tp)
        budget = None if memory is None else Budget(memory, share, reserve or 0)
        return cls(args, model, geometry, settings, state.source, batches, tp, draft, share, said, budget, plot)


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
