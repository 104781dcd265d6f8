"""Packed decode: every live row reads and writes its whole state. The replay kernel without a ring."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.launch import OPTIONS, decode_tile, on_device
from replayssm.kernels.triton.tiles import (
    columns,
    decayed,
    load_beta,
    load_gate,
    load_q_k,
    load_state,
    read_state,
    store_state,
)


@triton.jit
def packed_kernel(
    qkv_ptr, a_ptr, b_ptr, A_log_ptr, bias_ptr, state_ptr, out_ptr, slot_ptr, scale, lower_bound, beta_scale,
    qkv_row, a_row, a_head, a_chan, b_row, b_head, A_log_head, bias_head, bias_chan, state_slot, out_row, slot_step,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, VEC: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    L2NORM: tl.constexpr, IS_KDA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the batch x HV x TILES, on one axis."""
    pid = tl.program_id(0)
    head = pid // TILES % HV
    row = (pid // (TILES * HV)).to(tl.int64)
    first = pid % TILES * BV
    rows = first + tl.arange(0, BV)
    out_at = out_ptr + row * out_row + head * V + rows
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    if slot < 0:
        tl.store(out_at, tl.zeros([BV], out_ptr.dtype.element_ty), mask=rows < V)
        return

    cols = columns(BK, BC)
    state_at = state_ptr + slot * state_slot + head * (V * K)
    s = load_state(state_at, first, K, V, BV, BK, BC, VEC, EVEN)
    token = qkv_ptr + row * qkv_row
    q, k, _ = load_q_k(token, head // (HV // H), cols, scale, H, K, L2NORM, EVEN)
    v = tl.load(token + 2 * H * K + head * V + rows, mask=rows < V, other=0.0).to(tl.float32)
    wide = head.to(tl.int64)  # a and b may have any stride
    g = load_gate(
        a_ptr + row * a_row + wide * a_head, a_chan, A_log_ptr + head * A_log_head, bias_ptr + head * bias_head,
        bias_chan, cols, lower_bound, K, IS_KDA, BOUNDED,
    )  # fmt: skip
    beta = load_beta(b_ptr + row * b_row + wide * b_head, beta_scale)

    state_q, state_k = read_state(s, q, k, g, IS_KDA)
    d = beta * (v - state_k)
    o = state_q + d * tl.sum(tl.sum(q * k, 0), 0)
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=rows < V)
    acc = d[None, :, None] * k[:, None, :]
    store_state(state_at, decayed(s, g, IS_KDA) + acc, first, K, V, BV, BK, BC, VEC, EVEN)


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
) -> None:
    """Packed decode: every row reads and writes its whole state."""
    rows, (_, hv, v_dim, k_dim) = mixed_qkv.shape[0], initial_state.shape
    if not rows:
        return
    tile = decode_tile("kda" if is_kda else "gdn", initial_state.element_size(), rows * hv, v_dim, k_dim, 1)
    with on_device(initial_state):
        packed_kernel[(rows * hv * tile.tiles,)](
            mixed_qkv, a, b, A_log, dt_bias, initial_state, out, ssm_state_indices, scale, lower_bound or 0.0,
            beta_scale,
            mixed_qkv.stride(0), a.stride(0), a.stride(1), a.stride(-1), b.stride(0), b.stride(1),
            A_log.stride(0), dt_bias.stride(0), dt_bias.stride(-1), initial_state.stride(0), out.stride(0),
            ssm_state_indices.stride(0),
            H=(mixed_qkv.shape[1] - hv * v_dim) // (2 * k_dim), HV=hv, K=k_dim, V=v_dim,
            BV=tile.BV, BK=tile.BK, BC=tile.BC, VEC=tile.VEC, TILES=tile.tiles, EVEN=tile.even,
            L2NORM=use_qk_l2norm_in_kernel, IS_KDA=is_kda, BOUNDED=lower_bound is not None,
            num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
