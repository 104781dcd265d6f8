"""What a transformers model sees as its cache while the engine runs it: views into the slot pool and the pages.

One `EngineCache` serves all steps. `Rows` says which requests the next forward is for; the layers read and write their
parts of the pools by it. All rows of one forward are of one phase, and the phase decides what a layer does, never the
number of tokens: a decode step takes one token of each row and uses the ring, a prefill chunk takes several and works
on flushed states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from replayssm.engine.windows import LayerWindow, Windows
from replayssm.kernels.policy import Route
from replayssm.models.cache import DecodeLayer
from replayssm.spec import LayerSpec
from replayssm.state import PagePool, SlotPool

Phase = Literal["decode", "prefill"]


@dataclass
class Rows:
    """The requests of one forward, B rows of T tokens each.

    Attributes:
        phase: of all rows.
        slots: [B] int32, -1 for padding rows (decode only).
        start: tokens that were computed before, the same for all rows of a prefill chunk; 0 in a decode step.
        write: [B·T] int64, where the tokens go in a page array.
        read: [B, S] int64, the context of each row in a page array, these tokens included; a row that has fewer than S
            tokens reads zeros behind them. None where the context is the chunk itself, or is read from the pages.
        cursor: [B] int32, records of each row before the step (decode only).
        route: whether a decode step uses the ring.
        force_flush: [B] int32 or None, rows that fold at this step.
        paged: attention reads the pages themselves (decode only).
        windows, lengths: the step takes T tokens of each request, of which the first `lengths` [B] int32 count. To the
            rest of the model each of the B·T is a row: `write` is [B·T], `read` [B·T, S]. None without drafts.
    """

    phase: Phase
    slots: Tensor
    start: int
    write: Tensor
    read: Tensor | None
    cursor: Tensor | None = None
    route: Route = "replay"
    force_flush: Tensor | None = None
    paged: bool = False
    windows: Windows | None = None
    lengths: Tensor | None = None

    @property
    def length(self) -> int:
        """S, tokens of a context."""
        if self.read is not None:
            return self.read.shape[1]
        return self.write.shape[0] // self.slots.shape[0] if self.phase == "prefill" else 1


class _Current:
    """Where the layers find the rows of the forward that is running."""

    rows: Rows


class SlotLayer(DecodeLayer):
    """One linear-attention layer: a view of the slot pool that looks like transformers' own."""

    def __init__(self, pool: SlotPool, index: int, current: _Current) -> None:
        super().__init__()
        self.current, self.index = current, index
        self.views = pool.layer(index)

    # What a decode step asks (models.layers).

    @property
    def window(self) -> LayerWindow | None:  # type: ignore[override]
        """What reads several tokens of each request."""
        rows = self.current.rows
        if rows.windows is None or rows.lengths is None:
            return None
        return LayerWindow(rows.windows, self.index, rows.slots, rows.lengths, rows.cursor)

    @property
    def force_flush(self) -> Tensor | None:  # type: ignore[override]
        """Rows that fold at this step."""
        return self.current.rows.force_flush

    def takes_step(self, length: int) -> bool:
        """By phase."""
        return self.current.rows.phase == "decode"

    def rows(self, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """All slots of this layer, and which of them the step is for."""
        rows = self.current.rows
        return self.views.state, rows.slots, rows.cursor

    def route(self, spec: LayerSpec) -> Route:
        """One for all layers of a step."""
        rows = self.current.rows
        return rows.route if rows.phase == "decode" else "packed"

    def rings(self, spec: LayerSpec, io_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Of this layer, all slots."""
        d, k, g = self.views.d, self.views.k, self.views.g
        assert d is not None  # without a ring the route is "packed"
        assert k is not None
        assert g is not None
        return d, k, g

    def advance(self) -> None:
        """The cursor belongs to all layers; the runner moves it after the last one."""

    def flush(self) -> None:
        """The engine flushes before it prefills or decodes without a ring."""

    # What the stock layer asks in a prefill chunk, [B, C, W-1] and [B, HV, K, V].

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether the chunk continues a state."""
        return {0: self.current.rows.start > 0}

    @has_previous_state.setter
    def has_previous_state(self, value: object) -> None:
        """transformers' constructor sets it; here it follows from the rows."""

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """All windows for a decode step, which picks by slot; those of the rows [B, C, W-1] for a chunk."""
        rows = self.current.rows
        if rows.phase == "decode":
            return {0: self.views.conv}
        return {0: self.views.conv.index_select(0, rows.slots)}

    @conv_states.setter
    def conv_states(self, value: object) -> None:
        """As above."""

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """Of the rows, for a chunk: fp32 [B, HV, K, V]."""
        rows = self.current.rows
        return {0: self.views.state.index_select(0, rows.slots).float().transpose(-1, -2)}

    @recurrent_states.setter
    def recurrent_states(self, value: object) -> None:
        """As above."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Inputs of the chunk [B, C, T] with those that were before it; the last W-1 are kept."""
        rows, keep = self.current.rows, self.views.conv.shape[-1]
        full = conv_states
        if rows.start > 0:
            full = torch.cat([self.views.conv.index_select(0, rows.slots).to(full.dtype), full], -1)
        padded = torch.nn.functional.pad(full, (max(0, keep - full.shape[-1]), 0))
        last = padded[..., padded.shape[-1] - keep :]
        self.views.conv.index_copy_(0, rows.slots.long(), last.to(self.views.conv.dtype))
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """The state after the chunk [B, HV, K, V]."""
        new = recurrent_states.transpose(-1, -2).to(self.views.state.dtype)
        self.views.state.index_copy_(0, self.current.rows.slots.long(), new)
        return recurrent_states


class PagedLayer(DynamicLayer):
    """One attention layer: what it keeps for each token lies in pages."""

    def __init__(self, arrays: Sequence[Tensor], current: _Current) -> None:
        super().__init__()
        self.arrays, self.current = list(arrays), current

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys [B, H, T, D] and values (or latents) of the new tokens; returns those of the whole contexts."""
        return self._turn(0, key_states), self._turn(1, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same for indexer keys [B, T, D]."""
        return self._turn(2, indexer_key_states[:, None])[:, 0]

    def _turn(self, which: int, new: Tensor) -> Tensor:
        rows, store = self.current.rows, self.arrays[which]
        flat = new.transpose(1, 2).reshape(rows.write.shape[0], *store.shape[1:])
        store.index_copy_(0, rows.write, flat.to(store.dtype))
        if rows.paged:
            return store.transpose(0, 1)[None]
        return new if rows.read is None else store[rows.read].transpose(1, 2)

    @property
    def keys(self) -> Tensor:
        """Only its length is asked for."""
        return self.arrays[0][: self.current.rows.length, :1].transpose(0, 1)[None]

    @keys.setter
    def keys(self, value: object) -> None:
        """transformers' constructor sets it."""

    def get_seq_length(self) -> int:
        """Tokens of a context, these included."""
        return self.current.rows.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens of a context, and where they begin."""
        return self.current.rows.length, 0


class EngineCache(Cache):
    """`past_key_values` of every forward of the engine. Set `current.rows` first."""

    def __init__(self, linear: Sequence[bool], slots: SlotPool, pages: PagePool) -> None:
        self.current = _Current()
        slot_layers = (SlotLayer(slots, i, self.current) for i in range(slots.layers))
        page_layers = (PagedLayer(arrays, self.current) for arrays in pages.arrays)
        layers: list[Any] = [next(slot_layers) if is_linear else next(page_layers) for is_linear in linear]
        super().__init__(layers=layers)


def chunk_mask(start: int, tokens: int, device: torch.device) -> Tensor:
    """[1, 1, T, S] bool for T tokens after `start` others."""
    at = torch.arange(start + tokens, device=device)
    return (at <= at[start:, None])[None, None]
