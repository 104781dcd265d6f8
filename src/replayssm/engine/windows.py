"""Several tokens of a request in one decode step: what is read for them, and how a part of them is kept.

A *window* is the newest token of a request and the drafts behind it. The linear layers give outputs for all of its
tokens, the sampler says how many drafts are right, and only those may leave a trace in state and conv window.

* `ring`: records of all tokens go to the ring; the state stays as it is and the cursor moves past what is kept.
* `snapshot`: the state after each token is stored; that of the last one that is kept is copied back.
* `kv-replay`: the inputs of each token are stored; the recurrence runs again over what is kept, all layers in one
  launch.
* `fold`: records as in a ring that is empty at every step; those that are kept are folded at once, all layers and
  tokens in one launch.

Conv windows are only read while a window is verified; its inputs are kept here and pushed in afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replayssm import ops
from replayssm.engine.options import SpecState
from replayssm.spec import LayerSpec
from replayssm.state import SlotPool


class Windows:
    """Buffers for windows of up to `tokens` tokens of up to `rows` requests on one pool.

    Args:
        strategy: see the module.
        slots: the pool of the requests.
        tokens: T, of the longest window.
        rows: windows of one step.
        gates: A_log [HV] and dt_bias of each layer, for `kv-replay`.
    """

    def __init__(
        self,
        strategy: SpecState,
        slots: SlotPool,
        tokens: int,
        rows: int,
        gates: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.strategy, self.slots, self.tokens = strategy, slots, tokens

        dtypes = (str(x.dtype).removeprefix("torch.") for x in (slots.state, slots.conv))
        self._buffers = {
            name: torch.zeros(slots.layers, rows, *shape, dtype=getattr(torch, dtype), device=slots.device)
            for name, (shape, dtype) in slots.spec.window_arrays(strategy, tokens, *dtypes).items()
        }
        if strategy == "kv-replay":
            self._gates = [torch.stack([x.detach() for x in one]) for one in zip(*gates, strict=True)]

    @staticmethod
    def row_bytes(strategy: SpecState, specs: Sequence[LayerSpec], tokens: int, state_dtype: str, io_dtype: str) -> int:
        """Bytes of the buffers of one request."""
        arrays = specs[0].window_arrays(strategy, tokens, state_dtype, io_dtype)
        return len(specs) * sum(array.nbytes for array in arrays.values())

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(x.nbytes for x in self._buffers.values())

    def view(self, name: str, rows: int, tokens: int) -> Tensor:
        """[layers, B, T, …] of a buffer: "x", "snapshots", "mixed_qkv", "a" or "b"."""
        return self._buffers[name][:, :rows, :tokens]

    def commit(self, slots: Tensor, lengths: Tensor, accepted: Tensor, tokens: int, spec: LayerSpec) -> None:
        """Keep the first `accepted` [B] int32 tokens of windows that were just verified, in all layers."""
        pool, rows = self.slots, slots.shape[0]
        if self.strategy == "ring":
            assert pool.ring_len is not None
            ops.commit_cursors(pool.cursor, slots, pool.ring_len, lengths, accepted)
        elif self.strategy == "fold":
            assert pool.d is not None
            assert pool.k is not None
            assert pool.g is not None
            ops.commit_fold(pool.state, pool.d, pool.k, pool.g, slots, accepted)
        elif self.strategy == "snapshot":
            ops.commit_snapshot(pool.state, self.view("snapshots", rows, tokens), slots, accepted)
        else:
            mixed_qkv, a, b = (self.view(name, rows, tokens) for name in ("mixed_qkv", "a", "b"))
            A_log, dt_bias = self._gates
            kind: Any = dict(is_kda=spec.is_kda, lower_bound=spec.lower_bound, beta_scale=spec.beta_scale)
            ops.commit_kv_replay(mixed_qkv, a, b, A_log, dt_bias, pool.state, slots, accepted, **kind)
        ops.commit_conv(pool.conv, self.view("x", rows, tokens), slots, accepted)


class LayerWindow(NamedTuple):
    """The windows of one step in one layer: `lengths` [B] tokens of requests in `slots` [B], int32 both, on rings that
    hold `cursor` [B] records."""

    windows: Windows
    layer: int
    slots: Tensor
    lengths: Tensor
    cursor: Tensor | None

    def __call__(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, spec: LayerSpec, conv: nn.Conv1d
    ) -> Tensor:
        """See `replayssm.models.cache.Window`."""
        windows, rows = self.windows, self.slots.shape[0]
        tokens = mixed_qkv.shape[0] // rows
        views = windows.slots.layer(self.layer)
        kept = {name: windows.view(name, rows, tokens)[self.layer] for name in windows._buffers}
        a, b, x = (one.view(rows, tokens, *one.shape[1:]) for one in (a, b, mixed_qkv))
        kept["x"].copy_(x)
        mixed = ops.causal_conv_verify(
            kept["x"], views.conv, conv.weight.squeeze(1), conv.bias, self.slots, self.lengths, "silu",
            out=kept.get("mixed_qkv"),
        )  # fmt: skip
        if windows.strategy == "kv-replay":
            kept["a"].copy_(a)
            kept["b"].copy_(b)
        core = mixed.new_empty(rows, tokens, spec.num_v_heads, spec.head_v_dim)
        gates = (mixed, a, b, A_log, dt_bias, spec.head_k_dim**-0.5, views.state)
        kind = (spec.is_kda, spec.lower_bound, spec.beta_scale)
        if views.d is not None and views.k is not None and views.g is not None:
            assert self.cursor is not None
            ops.fused_recurrent_linear_replayssm_verify(
                *gates, views.d, views.k, views.g, core, self.slots, self.cursor, self.lengths, None, True, *kind
            )
        else:
            ops.fused_recurrent_linear_packed_verify(
                *gates, kept.get("snapshots"), core, self.slots, self.lengths, True, *kind
            )
        return core.view(rows * tokens, 1, *core.shape[2:])
