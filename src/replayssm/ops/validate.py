"""Checks before a launch: shapes, dtypes, devices, strides. Host-side only; nothing here reads a device.

Each failure raises the matching class of `replayssm.errors`, naming both conflicting values and the remedy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replayssm.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError
from replayssm.spec import HEAD_DIM_MAX, check_ring_len

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def shape(name: str, x: Tensor, want: tuple[int, ...], why: str = "") -> None:
    """`x` has exactly the shape `want`."""
    if x.shape != want:
        raise ShapeError.mismatch(name, tuple(x.shape), want, why)


def ndim(name: str, x: Tensor, dims: tuple[str, ...]) -> None:
    """`x` has one axis for each name in `dims`."""
    if x.ndim != len(dims):
        raise ShapeError(f"{name} has {x.ndim} axes {_dims(x)}, expected {len(dims)}: [{', '.join(dims)}]")


def dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """`x` has one of the dtypes `allowed`."""
    if x.dtype not in allowed:
        raise DtypeError.unsupported(name, x.dtype, allowed)


def same_device(first: str, x: Tensor, **others: Tensor | None) -> None:
    """All tensors are on the device of `x`."""
    device = x.device
    for name, y in others.items():
        if y is not None and y.device != device:
            raise DeviceError(f"{name} is on {y.device}, but {first} is on {device}; move one with .to(device)")


def indices(name: str, x: Tensor, rows: int, why: str) -> None:
    """int32 [rows]."""
    if x.dtype != torch.int32:
        raise DtypeError(f"{name} has dtype {str(x.dtype)[6:]}, supported: int32; convert once with .to(torch.int32)")
    shape(name, x, (rows,), why)


def option(ok: bool, message: str) -> None:
    """Raise `OptionError` unless `ok`."""
    if not ok:
        raise OptionError(message)


def dense_inner(name: str, x: Tensor, lead: int) -> None:
    """The axes after the first `lead` are contiguous; the leading strides are free, but nothing may overlap."""
    if x.is_contiguous() or x.numel() == 0:  # the usual case, in one cheap call
        return
    want = 1
    for axis in range(x.ndim - 1, lead - 1, -1):
        if x.shape[axis] != 1 and x.stride(axis) != want:
            raise LayoutError(
                f"{name} {_dims(x)} has stride {x.stride(axis)} on axis {axis}, expected {want}: each slot must be "
                f"contiguous, since the op works in place; allocate it so, or copy it back yourself"
            )
        want *= x.shape[axis]
    for axis in sorted(range(lead), key=x.stride):
        if x.shape[axis] != 1 and x.stride(axis) < want:
            raise LayoutError(
                f"{name} {_dims(x)} has stride {x.stride(axis)} on axis {axis}, but one entry there takes {want} "
                f"elements, so entries overlap; allocate it instead of expanding it"
            )
        want = max(want, x.stride(axis) * x.shape[axis])


def last_dim(name: str, x: Tensor) -> None:
    """The last axis is contiguous; the row stride is free."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise LayoutError(f"{name} has stride {x.stride(-1)} on its last axis, expected 1; call .contiguous() on it")


def state(name: str, x: Tensor, layered: bool = False) -> tuple[int, int, int]:
    """A pool [slots, HV, V, K], or [layers, slots, HV, V, K]. Returns (HV, V, K)."""
    ndim(name, x, ("layers", "slots", "HV", "V", "K") if layered else ("slots", "HV", "V", "K"))
    dtype(name, x, FLOATS)
    hv, v_dim, k_dim = x.shape[-3:]
    if not 1 <= k_dim <= HEAD_DIM_MAX or not 1 <= v_dim <= HEAD_DIM_MAX:
        raise ShapeError(f"{name} {_dims(x)} has V = {v_dim}, K = {k_dim}; both must be in 1…{HEAD_DIM_MAX}")
    dense_inner(name, x, x.ndim - 3)
    return hv, v_dim, k_dim


def inputs(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, initial_state: Tensor, out: Tensor,
    ssm_state_indices: Tensor, is_kda: bool,
) -> tuple[int, int]:  # fmt: skip
    """The arguments that every decode takes. Returns (B, H)."""
    hv, v_dim, k_dim = state("initial_state", initial_state)
    ndim("mixed_qkv", mixed_qkv, ("B", "2·H·K + HV·V"))
    dtype("mixed_qkv", mixed_qkv, FLOATS)
    rows, width = mixed_qkv.shape
    h = key_heads(width, hv, v_dim, k_dim)
    last_dim("mixed_qkv", mixed_qkv)
    gate = (hv, k_dim) if is_kda else (hv,)
    why = f"is_kda={is_kda}, HV = {hv} and K = {k_dim} of initial_state"
    shape("a", a, (rows, *gate), why)
    shape("b", b, (rows, hv), "B of mixed_qkv, HV of initial_state")
    shape("A_log", A_log, (hv,), "HV of initial_state")
    shape("dt_bias", dt_bias, gate, why)
    shape("out", out, (rows, 1, hv, v_dim), "B of mixed_qkv, HV and V of initial_state")
    for name, x in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias), ("out", out)):
        if x.dtype not in FLOATS:
            raise DtypeError.unsupported(name, x.dtype, FLOATS)
    dense_inner("out", out, 2)
    indices("ssm_state_indices", ssm_state_indices, rows, "one slot for each row of mixed_qkv")
    same_device(
        "initial_state", initial_state, mixed_qkv=mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, out=out,
        ssm_state_indices=ssm_state_indices,
    )  # fmt: skip
    return rows, h


def key_heads(width: int, hv: int, v_dim: int, k_dim: int) -> int:
    """H from the width of mixed_qkv."""
    h, rest = divmod(width - hv * v_dim, 2 * k_dim)
    if h < 1 or rest or hv % h:
        raise ShapeError(
            f"mixed_qkv has width {width}, but HV = {hv}, V = {v_dim}, K = {k_dim} of initial_state need "
            f"2·H·K + HV·V = {2 * k_dim}·H + {hv * v_dim} with H a divisor of {hv}"
        )
    return h


def ring(
    initial_state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, key_heads: int | None,
    is_kda: bool | None, layered: bool = False,
) -> int:  # fmt: skip
    """The three caches against the state pool. Returns L. None stands for what the caller derives from them."""
    lead = tuple(initial_state.shape[:-3])
    hv, v_dim, k_dim = initial_state.shape[-3:]
    pre = ("layers",) if layered else ()
    ndim("d_cache", d_cache, (*pre, "slots", "HV", "L", "V"))
    ndim("k_cache", k_cache, (*pre, "slots", "H", "L", "K"))
    length = check_ring_len(d_cache.shape[-2])
    h = k_cache.shape[-3] if key_heads is None else key_heads
    if h < 1 or hv % h:
        raise ShapeError(f"k_cache has {h} key heads, which do not divide HV = {hv} of initial_state")
    why = "slots, HV, V, K of initial_state, L of d_cache"
    shape("d_cache", d_cache, (*lead, hv, length, v_dim), why)
    shape("k_cache", k_cache, (*lead, h, length, k_dim), why + ", H of mixed_qkv" * (key_heads is not None))
    if is_kda is None:
        is_kda = g_cache.ndim == d_cache.ndim
    shape("g_cache", g_cache, (*lead, hv, length, k_dim) if is_kda else (*lead, hv, length), f"{why}, is_kda={is_kda}")
    for name, cache in (("d_cache", d_cache), ("g_cache", g_cache)):
        if cache.dtype != torch.float32:
            raise DtypeError(f"{name} has dtype {str(cache.dtype)[6:]}, supported: float32; rounded records drift")
    dtype("k_cache", k_cache, FLOATS)
    for name, cache in (("d_cache", d_cache), ("k_cache", k_cache), ("g_cache", g_cache)):
        dense_inner(name, cache, len(lead))
    same_device("initial_state", initial_state, d_cache=d_cache, k_cache=k_cache, g_cache=g_cache)
    return length


def gate_options(scale: float | None, is_kda: bool, lower_bound: float | None, beta_scale: float, k_dim: int) -> float:
    """The scalar options. Returns the scale, K**-0.5 for None."""
    if lower_bound is not None:
        option(is_kda, f"lower_bound = {lower_bound} needs is_kda=True; GDN has no bounded gate")
        option(lower_bound < 0, f"lower_bound = {lower_bound} must be < 0, since it bounds a log decay")
    option(0 < beta_scale < math.inf, f"beta_scale = {beta_scale} must be finite and > 0; use 1, or 2 where beta < 2")
    if scale is None:
        return k_dim**-0.5
    option(isinstance(scale, float), f"scale = {scale!r} must be a float or None (then K**-0.5 = {k_dim**-0.5:.6g})")
    option(math.isfinite(scale), f"scale = {scale} must be finite")
    return scale


def _dims(x: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in x.shape) + "]"
