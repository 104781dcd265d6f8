"""Entry points, with the arguments of the public operations. What is not here belongs to the portable kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from replayssm.kernels.gluon import launch
from replayssm.kernels.gluon.fold import fold_rows
from replayssm.kernels.gluon.fused import replay_fused
from replayssm.kernels.gluon.launch import Launch, Stream, Window
from replayssm.kernels.gluon.layouts import tile_layout
from replayssm.kernels.gluon.packed import packed
from replayssm.kernels.gluon.stream import replay_stream
from replayssm.kernels.gluon.verify import append_keys, verify

_GLUON_TYPES = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_LEAST, _MOST, _PIECE = 32, 256, 16  # K and V
_TOKENS, _WINDOW_RING = 8, 32  # of a window: beyond, what one thread holds would not fit its registers


def supports(initial_state: Tensor) -> str | None:
    """Why these kernels cannot take a call on such a state, or None when they can."""
    slots, _, v_dim, k_dim = initial_state.shape[-4:]
    if not all(_LEAST <= dim <= _MOST and dim % _PIECE == 0 for dim in (k_dim, v_dim)):
        return f"K = {k_dim}, V = {v_dim}; both must be multiples of {_PIECE} from {_LEAST} to {_MOST}"
    if not initial_state.is_cuda:
        return f"the state is on {initial_state.device.type}, not on a CUDA device"
    if torch.version.hip is not None:
        return "a ROCm device; these layouts and copies are NVIDIA's"
    major, minor = torch.cuda.get_device_capability(initial_state.device)
    if major not in (9, 10):  # the others have less shared memory a multiprocessor than the table assumes
        return f"compute capability {major}.{minor}; the launch table is for 9.x and 10.x"
    step = initial_state.stride(-4)
    if step % _PIECE:  # 16-byte copies that the compiler can prove to be aligned
        return f"slot stride {step} of the state is no multiple of {_PIECE}"
    if initial_state.data_ptr() % 16:
        return "the state is not aligned to 16 bytes"
    if slots == 0:
        return "the pool has no slots"
    return None


def replay_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    force_flush: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
    params: Launch | Stream | None = None,
) -> None:
    """Replay decode: a row appends its record, or folds the ring when it is full or `force_flush` says so.

    `params` overrides the launch table.
    """
    _, hv, v_dim, k_dim = initial_state.shape
    rows, length, h = mixed_qkv.shape[0], d_cache.shape[2], k_cache.shape[1]
    if params is None:
        size, step = initial_state.element_size(), initial_state.stride(0)
        params = launch.replay(is_kda, size, rows * hv, v_dim, k_dim, length, step % k_dim == 0)
    a, b = near(a), near(b)
    slots, pos = ssm_state_indices.contiguous(), write_pos.contiguous()
    force = None if force_flush is None else force_flush.contiguous()
    tensors = (
        mixed_qkv, a, b, A_log.contiguous(), dt_bias.contiguous(), scale, initial_state, d_cache, k_cache, g_cache,
        out, slots, pos, pos if force is None else force,
    )  # fmt: skip
    bound = 0.0 if lower_bound is None else float(lower_bound)
    strides = (
        mixed_qkv.stride(0), a.stride(0), a.stride(1), a.stride(2) if is_kda else 1, b.stride(0), b.stride(1),
        out.stride(0), initial_state.stride(0), d_cache.stride(0), k_cache.stride(0), g_cache.stride(0),
    )  # fmt: skip
    sizes = dict(
        H=h, HV=hv, K=k_dim, V=v_dim, L=length, LP=launch.padded(length, 8), KDA=is_kda,
        BOUNDED=lower_bound is not None, L2NORM=use_qk_l2norm_in_kernel, FORCE=force is not None,
    )  # fmt: skip
    with torch.cuda.device(initial_state.device):
        if isinstance(params, Stream):
            _stream(params, tensors, (bound, beta_scale), strides, sizes)
        else:
            replay_fused[(rows * hv * (v_dim // params.rows),)](
                *tensors, bound, beta_scale, *strides, **sizes, KP=launch.padded(k_dim), **params.constants,
                **params.options,
            )  # fmt: skip


def verifies(initial_state: Tensor, mixed_qkv: Tensor, out: Tensor, ring_len: int) -> str | None:
    """Why `replay_verify` cannot take a window on a state that `supports` takes, or None."""
    v_dim, k_dim = initial_state.shape[2:]
    tokens = mixed_qkv.shape[1]
    if not {v_dim, k_dim} <= {64, 128}:
        return f"K = {k_dim}, V = {v_dim}; a window takes 64 and 128"
    if initial_state.stride(0) % k_dim:
        return f"slot stride {initial_state.stride(0)} of the state is no multiple of K = {k_dim}"
    if tokens > _TOKENS or ring_len > _WINDOW_RING:
        return f"T = {tokens}, L = {ring_len}; a window takes up to {_TOKENS} tokens and rings up to {_WINDOW_RING}"
    if max(mixed_qkv.stride(1), out.stride(1)) * tokens >= 2**31:
        return "tokens of a window are more than 2**31 elements apart"
    return None


def replay_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    lengths: Tensor,
    force_flush: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
    params: Window | None = None,
) -> None:
    """A window of T tokens on a ring, if `verifies` says nothing against it. `params` overrides the launch table."""
    _, hv, v_dim, k_dim = initial_state.shape
    (rows, tokens), length, h = mixed_qkv.shape[:2], d_cache.shape[2], k_cache.shape[1]
    if params is None:
        params = launch.verify(is_kda, initial_state.element_size(), tokens, length)
    a, b = near(a), near(b)
    slots, pos, counts = (x.contiguous() for x in (ssm_state_indices, write_pos, lengths))
    force = pos if force_flush is None else force_flush.contiguous()
    bound = 0.0 if lower_bound is None else float(lower_bound)
    sizes: dict[str, Any] = dict(
        H=h, HV=hv, K=k_dim, V=v_dim, L=length, LP=launch.padded(length, 8), T=tokens,
        TP=launch.padded(tokens, params.warps), KDA=is_kda, BOUNDED=lower_bound is not None,
        L2NORM=use_qk_l2norm_in_kernel, FORCE=force_flush is not None,
    )  # fmt: skip
    with torch.cuda.device(initial_state.device):
        verify[(rows * hv,)](
            tiles_of(initial_state, params.chunk), mixed_qkv, a, b, A_log.contiguous(), dt_bias.contiguous(), scale,
            initial_state, d_cache, k_cache, g_cache, out, slots, pos, counts, force, bound, beta_scale,
            initial_state.stride(0) // k_dim, *mixed_qkv.stride()[:2], *a.stride()[:3], a.stride(3) if is_kda else 1,
            *b.stride(), *out.stride()[:2], *(x.stride(0) for x in (initial_state, d_cache, k_cache, g_cache)),
            **sizes, **params.constants(v_dim), **params.options,
        )  # fmt: skip
        if hv != h:
            append_keys[(rows * tokens,)](
                mixed_qkv, k_cache, slots, pos, counts, force, *mixed_qkv.stride()[:2], k_cache.stride(0), H=h,
                K=k_dim, L=length, T=tokens, FORCE=force_flush is not None, WIDE=launch.padded(h * k_dim),
                **launch.APPEND,
            )  # fmt: skip


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
    params: Launch | None = None,
) -> None:
    """Packed decode: every row reads and writes its whole state. `params` overrides the launch table."""
    _, hv, v_dim, k_dim = initial_state.shape
    rows = mixed_qkv.shape[0]
    h = (mixed_qkv.shape[1] - hv * v_dim) // (2 * k_dim)
    if params is None:
        params = launch.packed(is_kda, initial_state.element_size(), rows * hv, v_dim, k_dim)
    a, b = near(a), near(b)
    A_log, dt_bias, slots = A_log.contiguous(), dt_bias.contiguous(), ssm_state_indices.contiguous()
    bound = 0.0 if lower_bound is None else float(lower_bound)
    strides = (
        mixed_qkv.stride(0), a.stride(0), a.stride(1), a.stride(2) if is_kda else 1, b.stride(0), b.stride(1),
        out.stride(0), initial_state.stride(0),
    )  # fmt: skip
    sizes: dict[str, Any] = dict(
        H=h, HV=hv, K=k_dim, KP=launch.padded(k_dim), V=v_dim, KDA=is_kda, BOUNDED=lower_bound is not None,
        L2NORM=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    with torch.cuda.device(initial_state.device):
        packed[(rows * hv * (v_dim // params.rows),)](
            mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, slots, bound, beta_scale, *strides, **sizes,
            **params.constants, WHOLE=params.whole, STAGED=params.staged, **params.options,
        )  # fmt: skip


def flush(
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> None:
    """Fold ring[0:write_pos] of each row into its checkpoint; an optional leading layer axis on the pools."""
    lead = initial_state.ndim - 4
    layers = initial_state.shape[0] if lead else 1
    hv, v_dim, k_dim = initial_state.shape[-3:]
    rows, length = ssm_state_indices.shape[0], d_cache.shape[-2]
    pools = (initial_state, d_cache, k_cache, g_cache)
    params = launch.fold(initial_state.element_size(), v_dim, k_dim, length)
    with torch.cuda.device(initial_state.device):
        fold_rows[(layers * rows * hv * (v_dim // params.chunk),)](
            *pools, ssm_state_indices.contiguous(), write_pos.contiguous(), rows, *[p.stride(lead) for p in pools],
            *[p.stride(0) if lead else 0 for p in pools], H=k_cache.shape[-3], HV=hv, K=k_dim, KP=launch.padded(k_dim),
            V=v_dim, L=length, LP=launch.padded(length, 8), KDA=g_cache.ndim == d_cache.ndim,
            L2NORM=use_qk_l2norm_in_kernel, BV=params.chunk, NW=params.warps, num_warps=params.warps, **launch.FUSED,
        )  # fmt: skip


def _stream(
    params: Stream, tensors: tuple[Any, ...], scalars: tuple[float, float], strides: tuple[int, ...],
    sizes: dict[str, Any],
) -> None:  # fmt: skip
    state, rows = tensors[6], tensors[0].shape[0]
    _, hv, v_dim, k_dim = state.shape
    tiles = rows * hv * (v_dim // params.rows)
    programs = min(tiles, params.per_sm * multiprocessors(state.device))
    replay_stream[(programs,)](
        tiles_of(state, params.chunk), *tensors, *scalars, tiles, state.stride(0) // k_dim,
        *strides, **sizes, **params.constants, **params.options,
    )  # fmt: skip


def near(gate: Tensor) -> Tensor:
    """A gate input, copied if its heads and channels are so far apart that an offset within a row needs 64 bits."""
    reach = sum((n - 1) * step for n, step in zip(gate.shape[1:], gate.stride()[1:], strict=True))
    return gate if reach < 2**31 else gate.contiguous()


def tiles_of(state: Tensor, rows: int) -> TensorDescriptor:
    """A pool as one matrix of rows of K, copied in boxes of `rows`. [slots, HV, V, K], slot stride a multiple of K."""
    slots, hv, v_dim, k_dim = state.shape
    count = (slots - 1) * (state.stride(0) // k_dim) + hv * v_dim
    return TensorDescriptor(state, [count, k_dim], [k_dim, 1], [rows, k_dim], _tile_layout(rows, k_dim, state.dtype))


@cache
def _tile_layout(rows: int, k_dim: int, dtype: torch.dtype) -> Any:
    return tile_layout(rows, k_dim, _GLUON_TYPES[dtype])


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
