"""Which data type the recurrent state is stored in, and who decided it. Needs no torch.

Precedence, weakest first: float32 by default, the model config's `mamba_ssm_dtype`, the environment variable
`REPLAYSSM_STATE_DTYPE`, an option (keyword argument or command line).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from replayssm.errors import DtypeError
from replayssm.spec import STATE_DTYPES

ENV_VAR = "REPLAYSSM_STATE_DTYPE"
CONFIG_KEY = "mamba_ssm_dtype"
DEFAULT = "float32"
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class ResolvedDtype(NamedTuple):
    """A state dtype by its full name, and who decided it: 'default', 'model config …', 'environment …', 'option'."""

    name: str
    source: str


def resolve_state_dtype(
    option: str | None = None, config_value: str | None = None, environ: Mapping[str, str] = os.environ
) -> ResolvedDtype:
    """The strongest setting wins; an empty environment variable counts as unset.

    Only the winner is parsed: a bad weaker setting that is overridden does no harm. Raises `DtypeError`.
    """
    for value, source in (
        (option, "option"),
        (environ.get(ENV_VAR) or None, f"environment {ENV_VAR}"),
        (config_value, f"model config {CONFIG_KEY}"),
    ):
        if value is not None:
            return ResolvedDtype(parse_state_dtype(value, source), source)
    return ResolvedDtype(DEFAULT, "default")


def parse_state_dtype(value: object, source: str = "option") -> str:
    """Full name of `value` ('bf16', 'bfloat16', 'torch.bfloat16' or the torch dtype itself); else `DtypeError`."""
    name = str(value).strip().lower().removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    if name not in STATE_DTYPES:
        allowed = ", ".join(f"{full} ({short})" for short, full in SHORT_NAMES.items())
        raise DtypeError(f"state dtype {str(value)!r} from {source} is not supported; use one of {allowed}")
    return name
