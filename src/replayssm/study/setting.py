"""What a study varies: how the state is decoded and in what it is stored."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from replayssm.spec import DEFAULT_RING_LEN, STATE_DTYPES

Route = Literal["replay", "packed", "stock"]

RING_LENGTHS = (1, 2, 4, 8, 16, 32, 64)
ROUNDED, ROUNDED_RINGS = ("tf32", "bf16"), (8, 16)


class Setting(NamedTuple):
    """`stock` is transformers' own layer, with a state of its choice.

    `ring_len` and `operands` count for `replay` alone; other operands than exact ones are those of `rounding`.
    """

    route: Route
    state_dtype: str = "float32"
    ring_len: int = DEFAULT_RING_LEN
    operands: str = "exact"

    def as_row(self) -> dict[str, Any]:
        """For JSON; None where a field does not count."""
        dtype = None if self.route == "stock" else self.state_dtype
        replay = dict(ring_len=self.ring_len, operands=self.operands) if self.route == "replay" else {}
        return dict(route=self.route, state_dtype=dtype, ring_len=None, operands=None) | replay


BASELINE = Setting("packed")


def drift_settings() -> list[Setting]:
    """Packed, then replay with each ring length, for each state dtype; then rounded operands with an fp32 state."""
    settings = []
    for dtype in STATE_DTYPES:
        settings += [Setting("packed", dtype), *(Setting("replay", dtype, length) for length in RING_LENGTHS)]
    return settings + [Setting("replay", ring_len=n, operands=name) for name in ROUNDED for n in ROUNDED_RINGS]
