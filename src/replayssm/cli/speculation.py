"""Options of speculation that `generate` and `serve` share: what is given becomes fields of `EngineOptions`.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from replayssm.engine.options import EngineOptions, Spec, with_ring
from replayssm.errors import OptionError
from replayssm.spec import SpecState

SPEC_STATES: tuple[SpecState, ...] = get_args(SpecState)
DRAFTERS: tuple[Spec, ...] = get_args(Spec)
SPEC_FIELDS = ("spec", "spec_tokens", "spec_state", "spec_adaptive")
HELP = {
    "spec": "draft tokens and verify several in a step: ngram, what followed the same words before; mtp, by the "
    "model's own head (default: no drafts)",
    "spec_tokens": f"drafts of a step, at most (default {EngineOptions.spec_tokens})",
    "spec_state": f"how linear layers verify drafts and keep a part of them (default {EngineOptions.spec_state})",
    "spec_adaptive": "draft less where that is measured to be faster (default on)",
}


def spec_fields(given: Mapping[str, Any], ring_len: int | None) -> dict[str, Any]:
    """Fields of `EngineOptions` from those of `SPEC_FIELDS` that are `given`, and from `ring_len` where it is.

    Without a ring length, windows on a ring get one that suits them (`with_ring`).

    Raises `OptionError` for an option that would have no effect.
    """
    found = {name: given[name] for name in SPEC_FIELDS if given.get(name) is not None}
    if ring_len is not None:
        found["ring_len"] = ring_len
    if "spec" not in found:
        for name in SPEC_FIELDS:
            if name in found:
                raise OptionError(f"{_option(name, found[name])} has no effect without --spec {' or '.join(DRAFTERS)}")
        return found
    state = found.get("spec_state", EngineOptions.spec_state)
    if state != "ring" and ring_len is not None:
        raise OptionError(f"--ring-len {ring_len} has no effect with --spec-state {state}; drop one of them")
    return with_ring(found)


def ring_note(options: EngineOptions, ring_len: int | None) -> str | None:
    """What to say about a ring that `spec_fields` chose; None where it chose none."""
    if options.spec is None or options.spec_state != "ring" or ring_len is not None:
        return None
    return (
        f"ring of {options.ring_len}, for windows of {options.window} tokens ({options.spec_tokens} drafts and the "
        "newest one); --ring-len takes another"
    )


def describe(options: EngineOptions) -> str:
    """One line about drafts."""
    if options.spec is None:
        return "off"
    adaptive = "up to " if options.spec_adaptive else ""
    ring = f" of {options.ring_len}" if options.spec_state == "ring" else ""
    return f"{options.spec}, {adaptive}{options.spec_tokens} drafts a step, verified by {options.spec_state}{ring}"


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name.replace('_', '-')}"
    return f"--{name.replace('_', '-')} {value}"
