"""Windows by the recurrence, token after token, on states without a ring (torch backend); then what of them is kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from replayssm.kernels.torch_rows import live_rows, rounded
from replayssm.kernels.torch_window import Window, per_value_head, window


def packed_verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    snapshots: Tensor | None,
    out: Tensor,
    ssm_state_indices: Tensor,
    lengths: Tensor,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """See `replayssm.ops.fused_recurrent_linear_packed_verify`."""
    rows = live_rows(ssm_state_indices)
    out.zero_()
    if rows.length == 0:
        return
    heads = initial_state.shape[1], initial_state.shape[2], initial_state.shape[3]
    w = window(
        rows, rows.take(lengths), mixed_qkv, a, b, A_log, dt_bias, scale, heads, use_qk_l2norm_in_kernel, is_kda,
        lower_bound, beta_scale,
    )  # fmt: skip
    q, state = per_value_head(w.q, heads[0]), initial_state.index_select(0, rows.slots).float()
    numbers = torch.arange(out.shape[0], device=out.device) if rows.where is None else rows.where
    for t, state_after in enumerate(_run(w, state)):
        alive = w.alive[:, t].nonzero().squeeze(1)
        at, now = numbers[alive], state_after[alive]
        out[at, t] = torch.matmul(now, q[alive, :, t, :, None]).squeeze(-1).to(out.dtype)
        if snapshots is not None:
            snapshots[at, t] = rounded(now, snapshots.dtype)


def commit_kv_replay(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    accepted: Tensor,
    use_qk_l2norm_in_kernel: bool,
    is_kda: bool,
    lower_bound: float | None,
    beta_scale: float,
) -> None:
    """See `replayssm.ops.commit_kv_replay`."""
    rows = live_rows(torch.where(accepted > 0, ssm_state_indices, -1))
    if rows.length == 0:
        return
    counts = rows.take(accepted)
    layers = (mixed_qkv, a, b, A_log, dt_bias, initial_state)
    for qkv, x, y, rate, bias, state in zip(*layers, strict=True) if initial_state.ndim == 5 else iter([layers]):
        heads = state.shape[1], state.shape[2], state.shape[3]
        w = window(
            rows, counts, qkv, x, y, rate, bias, 1.0, heads, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale
        )
        work = state.index_select(0, rows.slots).float()
        for _ in _run(w, work):
            pass
        state.index_copy_(0, rows.slots, rounded(work, state.dtype))


def _run(w: Window, state: Tensor) -> Iterator[Tensor]:
    """The state [n, HV, V, K] fp32, in place, after each token; a dead token leaves a row's state as it is."""
    hv = state.shape[1]
    k = per_value_head(w.k, hv)
    for t in range(w.alive.shape[1]):
        now = k[:, :, t]
        state.mul_(w.g[:, t].exp().unsqueeze(-2))
        d = w.beta[:, t, :, None] * (w.v[:, t] - torch.matmul(state, now.unsqueeze(-1)).squeeze(-1))
        state.addcmul_(d.unsqueeze(-1), now.unsqueeze(-2))
        yield state
