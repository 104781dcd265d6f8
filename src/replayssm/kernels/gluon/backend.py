"""Entry points, with the arguments of the public operations. What is not here belongs to the portable kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from replayssm.kernels.gluon import launch
from replayssm.kernels.gluon.fold import fold_rows
from replayssm.kernels.gluon.fused import replay_fused
from replayssm.kernels.gluon.launch import Launch
from replayssm.kernels.gluon.packed import packed
from replayssm.kernels.gluon.split import prologue, readout

_POWERS = (32, 64, 128, 256)


def supports(initial_state: Tensor, mixed_qkv: Tensor, d_cache: Tensor | None = None) -> str | None:
    """Why these kernels cannot take a call, or None when they can."""
    v_dim, k_dim = initial_state.shape[-2:]
    if k_dim not in _POWERS or v_dim not in _POWERS:
        return f"K = {k_dim}, V = {v_dim}; both must be one of {_POWERS}"
    if not initial_state.is_cuda:
        return f"the state is on {initial_state.device.type}, not on a CUDA device"
    if torch.version.hip is not None:
        return "a ROCm device; these layouts and copies are NVIDIA's"
    major, minor = torch.cuda.get_device_capability(initial_state.device)
    if major not in (9, 10):  # the others have less shared memory a multiprocessor than the table assumes
        return f"compute capability {major}.{minor}; the launch table is for 9.x and 10.x"
    if initial_state.stride(0) % 16:  # else the compiler cannot prove that 16-byte copies are aligned
        return f"slot stride {initial_state.stride(0)} of the state is no multiple of 16"
    if initial_state.data_ptr() % 16:
        return "the state is not aligned to 16 bytes"
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
    params: Launch | None = None,
) -> None:
    """Replay decode: a row appends its record, or folds the ring when it is full or `force_flush` says so.

    `params` overrides the launch table.
    """
    _, hv, v_dim, k_dim = initial_state.shape
    rows, length, h = mixed_qkv.shape[0], d_cache.shape[2], k_cache.shape[1]
    kind = "kda" if is_kda else "gdn"
    if params is None:
        params = launch.choose(launch.REPLAY, kind, initial_state.element_size(), rows, v_dim, k_dim, length)
    padded = max(8, 1 << (length - 1).bit_length())
    slots, pos = ssm_state_indices.contiguous(), write_pos.contiguous()
    force = None if force_flush is None else force_flush.contiguous()
    A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    a_strides = (a.stride(0), a.stride(1), a.stride(2) if is_kda else 1)
    gate = dict(KDA=is_kda, BOUNDED=lower_bound is not None, L2NORM=use_qk_l2norm_in_kernel)
    bound = 0.0 if lower_bound is None else float(lower_bound)
    options: dict[str, Any] = dict(num_warps=params.warps)
    if params.maxnreg is not None:
        options["maxnreg"] = params.maxnreg
    tiles = rows * hv * (v_dim // params.rows)
    with torch.cuda.device(initial_state.device):
        if params.two_launches:
            room = scratch(initial_state.device, torch.cuda.current_stream().cuda_stream, rows * hv, k_dim, padded)
            prologue[(rows * hv,)](
                mixed_qkv, a, b, A_log, dt_bias, scale, k_cache, g_cache, slots, pos, room, bound, beta_scale,
                mixed_qkv.stride(0), *a_strides, b.stride(0), b.stride(1), k_cache.stride(0), g_cache.stride(0),
                H=h, HV=hv, K=k_dim, L=length, LP=padded, **gate, NW=params.prologue_warps, SCAN=params.scan,
                PDL=params.pdl, num_warps=params.prologue_warps,
            )  # fmt: skip
            if params.pdl:
                options["launch_pdl"] = True
            readout[(tiles,)](
                mixed_qkv, initial_state, d_cache, k_cache, g_cache, out, slots, pos, pos if force is None else force,
                room, mixed_qkv.stride(0), out.stride(0), initial_state.stride(0), d_cache.stride(0),
                k_cache.stride(0), g_cache.stride(0), H=h, HV=hv, K=k_dim, V=v_dim, L=length, LP=padded, KDA=is_kda,
                L2NORM=use_qk_l2norm_in_kernel, FORCE=force is not None, BV=params.rows, CH=params.chunk,
                NW=params.warps, STAGED=params.staged, FOLD=params.fold, SCAN=params.scan, EVICT=params.evict,
                PDL=params.pdl, **options,
            )  # fmt: skip
        else:
            replay_fused[(tiles,)](
                mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, slots, pos,
                pos if force is None else force, bound, beta_scale, mixed_qkv.stride(0), *a_strides, b.stride(0),
                b.stride(1), out.stride(0), initial_state.stride(0), d_cache.stride(0), k_cache.stride(0),
                g_cache.stride(0), H=h, HV=hv, K=k_dim, V=v_dim, L=length, LP=padded, **gate,
                FORCE=force is not None, BV=params.rows, CH=params.chunk, NW=params.warps, STAGED=params.staged,
                FOLD=params.fold, SCAN=params.scan, EVICT=params.evict, **options,
            )  # fmt: skip
        if params.fold == launch.FOLD_LATER:
            _fold(
                initial_state, d_cache, k_cache, g_cache, slots, pos, force, use_qk_l2norm_in_kernel, is_kda, True,
                params.scan,
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
        kind = "kda" if is_kda else "gdn"
        params = launch.choose(launch.PACKED, kind, initial_state.element_size(), rows, v_dim, k_dim)
    options: dict[str, Any] = dict(num_warps=params.warps)
    if params.maxnreg is not None:
        options["maxnreg"] = params.maxnreg
    with torch.cuda.device(initial_state.device):
        packed[(rows * hv * (v_dim // params.rows),)](
            mixed_qkv, a, b, A_log.contiguous(), dt_bias.contiguous(), scale, initial_state, out,
            ssm_state_indices.contiguous(), 0.0 if lower_bound is None else float(lower_bound), beta_scale,
            mixed_qkv.stride(0), a.stride(0), a.stride(1), a.stride(2) if is_kda else 1, b.stride(0), b.stride(1),
            out.stride(0), initial_state.stride(0), H=h, HV=hv, K=k_dim, V=v_dim, KDA=is_kda,
            BOUNDED=lower_bound is not None, L2NORM=use_qk_l2norm_in_kernel, BV=params.rows, CH=params.chunk,
            NW=params.warps, STAGED=params.staged, EVICT=params.evict, **options,
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
    is_kda = g_cache.ndim == d_cache.ndim
    with torch.cuda.device(initial_state.device):
        _fold(
            initial_state, d_cache, k_cache, g_cache, ssm_state_indices.contiguous(), write_pos.contiguous(), None,
            use_qk_l2norm_in_kernel, is_kda, False, True,
        )  # fmt: skip


def _fold(
    state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, slots: Tensor, pos: Tensor,
    force: Tensor | None, l2norm: bool, is_kda: bool, decode: bool, scan: bool,
) -> None:  # fmt: skip
    layers = state.shape[0] if state.ndim == 5 else 1
    hv, v_dim, k_dim = state.shape[-3:]
    rows, length = slots.shape[0], d_cache.shape[-2]
    pools = (state, d_cache, k_cache, g_cache)
    lead = state.ndim - 4
    slot_strides = [p.stride(lead) for p in pools]
    layer_strides = [p.stride(0) if lead else 0 for p in pools]
    params = Launch(launch.FOLD_ROWS, launch.FOLD_ROWS, launch.FOLD_WARPS, staged=False)
    params = params.fit(v_dim, k_dim, state.element_size())
    block = params.chunk
    fold_rows[(layers * rows * hv * (v_dim // block),)](
        *pools, slots, pos, pos if force is None else force, rows, *slot_strides, *layer_strides,
        H=k_cache.shape[-3], HV=hv, K=k_dim, V=v_dim, L=length, LP=max(8, 1 << (length - 1).bit_length()), KDA=is_kda,
        L2NORM=l2norm, DECODE=decode, FORCE=force is not None, BV=block, NW=params.warps, SCAN=scan,
        num_warps=params.warps,
    )  # fmt: skip


@cache  # never evict: a captured graph keeps the address
def _scratch(device: torch.device, stream: int, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


def scratch(device: torch.device, stream: int, heads: int, k_dim: int, padded: int) -> Tensor:
    """What the prologue hands to the readout. One buffer per device, stream and size class, kept for ever.

    Steps of one stream run one after the other, so they may share it; those of two streams may not. That includes
    graphs: two that were captured on one stream must not replay at the same time.
    """
    size = heads * (2 * k_dim + 2 * padded + 8)
    return _scratch(device, stream, 1 << (size - 1).bit_length())
