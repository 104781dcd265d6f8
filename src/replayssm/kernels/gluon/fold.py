# mypy: ignore-errors
"""Fold rings into checkpoints outside decode."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.kernels.gluon import blocks
from replayssm.kernels.gluon.layouts import (
    as_rows,
    ring_k_layout,
    row_major,
    state_layout,
)


@gluon.jit
def fold_rows(
    state, d_ring, k_ring, g_ring, slots, write_pos, rows_total, state_slot, d_slot, k_slot, g_slot,
    state_layer, d_layer, k_layer, g_layer,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, KP: gl.constexpr, V: gl.constexpr, L: gl.constexpr,
    LP: gl.constexpr, KDA: gl.constexpr, L2NORM: gl.constexpr, BV: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """For each row and layer: state ← state·decay + Σ_j d_j (w_j ∘ k̂_j)ᵀ. A program serves BV rows of V."""
    ELEM: gl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    blk: gl.constexpr = state_layout(BV, KP, ELEM, NW)
    kl: gl.constexpr = ring_k_layout(LP, KP, NW)
    TILES: gl.constexpr = V // BV

    pid = gl.program_id(0)
    row0 = pid % TILES * BV
    hv = pid // TILES % HV
    entry = pid // (TILES * HV)
    n = (entry % rows_total).to(gl.int64)
    layer = (entry // rows_total).to(gl.int64)
    h = hv // (HV // H)
    slot = gl.load(slots + n).to(gl.int64)
    if slot < 0:
        return
    count = gl.load(write_pos + n)
    if count <= 0:
        return

    ov = row0 + gl.arange(0, BV, gl.SliceLayout(1, blk))
    ok = gl.arange(0, KP, gl.SliceLayout(0, blk))
    s_ptr = state + layer * state_layer + slot * state_slot + hv * (V * K) + ov[:, None] * K + ok[None, :]
    k_base = k_ring + layer * k_layer + slot * k_slot + h * (L * K)
    d_base = d_ring + layer * d_layer + slot * d_slot + hv * (L * V)
    g_base = g_ring + layer * g_layer + slot * g_slot + hv * (L * K if KDA else L)
    weighted, decay = blocks.weighted_records(k_base, g_base, count, K, KP, LP, KDA, L2NORM, kl)
    tile = gl.allocate_shared_memory(gl.float32, [LP, KP], row_major())
    tile.store(weighted)
    rows = as_rows(tile, LP, KP)

    s = blocks.load_columns(s_ptr, ok[None, :], K, KP).to(gl.float32)
    s *= gl.convert_layout(decay, gl.SliceLayout(0, blk))[None, :]
    for j in range(count):
        d = gl.load(d_base + j * V + ov)
        s += d[:, None] * rows.index(LP - 1 - j).load(blk)
    blocks.store_columns(s_ptr, blocks.to_state(s, state.dtype.element_ty), ok[None, :], K, KP)
