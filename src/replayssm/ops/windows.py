"""Checks of the operations on windows: several tokens a row. Host-side only; errors as in `validate`."""

from __future__ import annotations

from torch import Tensor

from replayssm.errors import DtypeError, ShapeError
from replayssm.ops import validate
from replayssm.spec import RING_LEN_MAX


def inputs(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, initial_state: Tensor,
    ssm_state_indices: Tensor, is_kda: bool, layered: bool = False,
) -> tuple[int, int, int]:  # fmt: skip
    """What every operation on tokens takes, all but the states with axes B, T after those of the layers.

    Returns (B, T, H).
    """
    hv, v_dim, k_dim = validate.state("initial_state", initial_state, layered)
    pre = ("layers",) if layered else ()
    lead = (initial_state.shape[0],) if layered else ()
    validate.ndim("mixed_qkv", mixed_qkv, (*pre, "B", "T", "2·H·K + HV·V"))
    validate.dtype("mixed_qkv", mixed_qkv, validate.FLOATS)
    rows, tokens, width = mixed_qkv.shape[-3:]
    validate.shape("mixed_qkv", mixed_qkv, (*lead, rows, tokens, width), "layers of initial_state")
    h = validate.key_heads(width, hv, v_dim, k_dim)
    validate.last_dim("mixed_qkv", mixed_qkv)
    if not 1 <= tokens <= RING_LEN_MAX:
        raise ShapeError(f"mixed_qkv has windows of T = {tokens} tokens; T must be in 1…{RING_LEN_MAX}")
    head = (hv, k_dim) if is_kda else (hv,)
    why = f"is_kda={is_kda}, B and T of mixed_qkv, HV = {hv} and K = {k_dim} of initial_state"
    validate.shape("a", a, (*lead, rows, tokens, *head), why)
    validate.shape("b", b, (*lead, rows, tokens, hv), "B and T of mixed_qkv, HV of initial_state")
    validate.shape("A_log", A_log, (*lead, hv), "HV of initial_state")
    validate.shape("dt_bias", dt_bias, (*lead, *head), why)
    for name, x in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
        validate.dtype(name, x, validate.FLOATS)
    validate.indices("ssm_state_indices", ssm_state_indices, rows, "one slot for each row of mixed_qkv")
    validate.same_device(
        "initial_state", initial_state, mixed_qkv=mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
        ssm_state_indices=ssm_state_indices,
    )  # fmt: skip
    return rows, tokens, h


def output(out: Tensor, mixed_qkv: Tensor, initial_state: Tensor) -> None:
    """out [B, T, HV, V]; HV and V contiguous."""
    hv, v_dim, _ = initial_state.shape[-3:]
    validate.shape("out", out, (*mixed_qkv.shape[:2], hv, v_dim), "B and T of mixed_qkv, HV and V of initial_state")
    validate.dtype("out", out, validate.FLOATS)
    validate.dense_inner("out", out, 2)
    validate.same_device("initial_state", initial_state, out=out)


def counts(initial_state: Tensor, rows: int, **named: Tensor | None) -> None:
    """int32 [B] each, on the device of the state."""
    for name, x in named.items():
        if x is not None:
            validate.indices(name, x, rows, "one for each row")
    validate.same_device("initial_state", initial_state, **named)


def fits_ring(tokens: int, ring_len: int) -> None:
    """A window must have room in an empty ring."""
    if tokens > ring_len:
        raise ShapeError(
            f"a window of T = {tokens} tokens does not fit a ring of length {ring_len}; allocate the ring with "
            f"ring_len={tokens + 1} or more, or draft at most {ring_len - 1} tokens"
        )


def ring_dtype(k_cache: Tensor, mixed_qkv: Tensor) -> None:
    """Raw keys are kept as they come."""
    if k_cache.dtype != mixed_qkv.dtype:
        got, want = str(k_cache.dtype)[6:], str(mixed_qkv.dtype)[6:]
        raise DtypeError(f"k_cache has dtype {got}, but mixed_qkv has {want}; allocate the ring with io_dtype={want!r}")


def conv(
    name: str, x: Tensor, conv_state: Tensor, ssm_state_indices: Tensor, layered: bool = False
) -> tuple[int, int, int]:
    """x [(layers,) B, T, C] beside windows [(layers,) slots, C, S]. Returns (B, T, S)."""
    pre = ("layers",) if layered else ()
    validate.ndim("conv_state", conv_state, (*pre, "slots", "C", "S"))
    validate.ndim(name, x, (*pre, "B", "T", "C"))
    lead = tuple(conv_state.shape[:-3])
    rows, tokens, channels = x.shape[-3:]
    slots, _, size = conv_state.shape[-3:]
    validate.shape(name, x, (*lead, rows, tokens, channels), "layers of conv_state")
    validate.shape("conv_state", conv_state, (*lead, slots, channels, size), f"C of {name}")
    if not 1 <= tokens <= RING_LEN_MAX:
        raise ShapeError(f"{name} has windows of T = {tokens} tokens; T must be in 1…{RING_LEN_MAX}")
    for what, y in ((name, x), ("conv_state", conv_state)):
        validate.dtype(what, y, validate.FLOATS)
    channels_last = conv_state.stride(-2) == 1 and channels > 1 and size > 1
    validate.dense_inner("conv_state", conv_state.mT if channels_last else conv_state, len(lead) + 1)
    validate.indices("ssm_state_indices", ssm_state_indices, rows, f"one slot for each row of {name}")
    validate.same_device(name, x, conv_state=conv_state, ssm_state_indices=ssm_state_indices)
    return rows, tokens, size
