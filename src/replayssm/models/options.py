"""How the linear-attention layers of one model decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from replayssm.dtypes import resolve_state_dtype
from replayssm.errors import OptionError
from replayssm.spec import DEFAULT_RING_LEN, check_ring_len

Mode = Literal["auto", "replay", "packed"]


@dataclass(frozen=True)
class ReplayOptions:
    """Ring length L (1 … 64), dtype of the recurrent state, and the decode path.

    `replay` reads the state and appends to the ring; `packed` reads and writes the state at every step and has no ring;
    `auto` takes the one that `ops.decode_route` names for the batch size, on a CPU always replay.
    """

    ring_len: int = DEFAULT_RING_LEN
    state_dtype: torch.dtype = torch.float32
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        check_ring_len(self.ring_len)
        if self.mode not in get_args(Mode):
            raise OptionError(f"mode {self.mode!r} is unknown; use one of {', '.join(get_args(Mode))}")

    @classmethod
    def resolve(
        cls, ring_len: int, state_dtype: str | torch.dtype | None, mode: Mode, config_dtype: str | None = None
    ) -> ReplayOptions:
        """Apply the precedence default < model config < environment < argument to the state dtype."""
        wanted = None if state_dtype is None else str(state_dtype)
        return cls(ring_len, getattr(torch, resolve_state_dtype(wanted, config_dtype).name), mode)
