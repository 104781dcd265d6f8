"""Which decode a batch should take: asked on the host, before the launch."""

from __future__ import annotations

from torch import Tensor

from replayssm.errors import OptionError
from replayssm.kernels import policy
from replayssm.kernels.policy import Route
from replayssm.ops import validate
from replayssm.spec import check_ring_len


def decode_route(initial_state: Tensor, ring_len: int, rows: int, is_kda: bool = False) -> Route:
    """Whether a batch of `rows` rows decodes faster by "replay" or "packed", from the table in `kernels.policy`.

    An engine asks once for each batch size that it launches, padding rows included, and captures the op that the
    answer names. Only shapes, dtype and device count, so nothing waits for the device.

    Packed decode reads the checkpoint alone: the rings of its slots must be empty. When the answer for a slot changes
    to "packed", call `flush` on it once and set its cursor to 0. From then on the cursor stays 0 and is not advanced;
    the step that replays again finds an empty ring.

    Args:
        initial_state: the pool, [slots, HV, V, K] or [layers, slots, HV, V, K].
        ring_len: L.
        rows: B of a decode call.
        is_kda: decay per key channel instead of per head.

    Raises:
        ShapeError, DtypeError, LayoutError, RingLengthError, OptionError.
    """
    heads, _, _ = validate.state("initial_state", initial_state, layered=initial_state.ndim == 5)
    check_ring_len(ring_len)
    if rows < 0:
        raise OptionError(f"rows = {rows} must be at least 0")
    return policy.decode_route(initial_state.device.type, is_kda, initial_state.element_size(), rows * heads, ring_len)
