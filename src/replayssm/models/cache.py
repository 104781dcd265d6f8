"""The cache that a transformers model decodes from: checkpoint, ring and cursor beside its own attention layers.

One `ReplayLayer` holds one linear-attention layer; row b of the batch is slot b. The invariant: the true state of a
layer is checkpoint + ring[0:cursor]. Whoever reads a state outside decode goes through `recurrent_states`, which
flushes first.

Each layer has a cursor of its own. One for all layers would do where somebody knows when a forward begins and ends;
a cache that user code passes around, reads from hooks, copies and reuses after errors has nobody who knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

from replayssm import ops
from replayssm.errors import CacheStateError, ShapeError
from replayssm.kernels.policy import Route
from replayssm.models.options import Mode, ReplayOptions
from replayssm.spec import DEFAULT_RING_LEN, LayerSpec


class Window(Protocol):
    """Several tokens of each request in one decode step: its rows are T tokens of the first request, then of the next.

    Takes the layer's inputs of all rows, [B·T, C], [B·T, HV(, K)] and [B·T, HV], its parameters and the conv's, and
    returns what the layer reads [B·T, 1, HV, V].
    """

    def __call__(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, spec: LayerSpec, conv: nn.Conv1d
    ) -> Tensor:
        """As above."""
        ...


class DecodeLayer(LinearAttentionLayer):
    """What a replay layer of the model asks of its cache layer, besides what a stock layer asks."""

    window: Window | None = None  # of the decode step that runs; None where a row is a request
    force_flush: torch.Tensor | None = None  # rows that must fold at the next step, [B] int32

    def takes_step(self, length: int) -> bool:
        """Whether a forward of `length` tokens a row is a decode step."""
        raise NotImplementedError

    def rows(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Pool of checkpoints [slots, HV, V, K], slots [B] int32 and cursors [B] int32 of `batch` rows."""
        raise NotImplementedError

    def route(self, spec: LayerSpec) -> Route:
        """How the next step decodes. Before a packed one the ring must be flushed."""
        raise NotImplementedError

    def rings(self, spec: LayerSpec, io_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The d, k and g caches of the pool."""
        raise NotImplementedError

    def advance(self) -> None:
        """A replay step of this layer is done."""
        raise NotImplementedError

    def flush(self) -> None:
        """Fold the ring into the checkpoint."""
        raise NotImplementedError


class ReplayLayer(DecodeLayer):
    """State of one linear-attention layer: conv state, checkpoint [B, HV, V, K], ring, and cursor [B] int32.

    To transformers it is an ordinary linear-attention cache layer whose recurrent state [B, HV, K, V] is a
    transposed view of the checkpoint, flushed whenever somebody asks for it.
    """

    def __init__(self, options: ReplayOptions, number_of_states: int = 1) -> None:
        self.options = options
        self.packed = options.mode == "packed"  # whatever the batch size
        self.checkpoint: torch.Tensor | None = None
        self.ring: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.cursor: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._pending = False  # the ring may hold a record; kept on the host, so that nobody has to read the cursor
        super().__init__(number_of_states=number_of_states)

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """State by index, [B, HV, K, V] as transformers has it. Reading it flushes; writing into it is allowed."""
        self.flush()
        return self._states

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self._states = states

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Allocate what is given; `recurrent_states` [B, HV, K, V] only lends its shape and device."""
        if conv_states is not None:
            super().lazy_initialization(conv_states, None, state_idx, conv_kernel_size)
        if recurrent_states is not None:
            batch, heads, k, v = recurrent_states.shape
            checkpoint = recurrent_states.new_zeros((batch, heads, v, k), dtype=self.options.state_dtype)
            self._set_checkpoint(checkpoint)
            self.is_recurrent_states_initialized[state_idx] = True

    def _set_checkpoint(self, checkpoint: torch.Tensor) -> None:
        self.checkpoint = _static(checkpoint)
        self._states[0] = checkpoint.transpose(-1, -2)
        self.ring = self.cursor = self._slots = None
        self.device = checkpoint.device  # type: ignore[assignment]

    def rings(self, spec: LayerSpec, io_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The d, k and g caches, allocated when first asked for. Dead rows are left undefined.

        Autocast may change the activation dtype between two steps; the ring then starts anew from a flushed state.
        """
        if self.ring is not None and self.ring[1].dtype != io_dtype:
            self.flush()
            self.ring = None
        if self.ring is None:
            assert self.checkpoint is not None
            arrays = spec.ring_arrays(self.options.ring_len, self.checkpoint.shape[0], _name(io_dtype))
            d, k, g = (
                _static(torch.empty(a.shape, dtype=getattr(torch, a.dtype), device=self.checkpoint.device))
                for a in arrays
            )
            self.ring = (d, k, g)
        return self.ring

    def rows(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Checkpoint, slots and cursors for `batch` rows. Raises `ShapeError` when the cache holds another number."""
        if self.checkpoint is None:
            raise CacheStateError("this cache layer has a conv state but no recurrent state; start from an empty cache")
        if batch != self.checkpoint.shape[0]:
            raise ShapeError(
                f"the batch has {batch} rows, the cache {self.checkpoint.shape[0]}; "
                "use one cache per batch, or cache.batch_select_indices to change it"
            )
        if self._slots is None or self.cursor is None:
            self._slots = torch.arange(batch, dtype=torch.int32, device=self.checkpoint.device)
            self.cursor = _static(torch.zeros_like(self._slots))
        return self.checkpoint, self._slots, self.cursor

    def takes_step(self, length: int) -> bool:
        """Whether a forward of `length` tokens a row is a decode step: one token that continues a state."""
        return length == 1 and self.has_previous_state[0] and not self.record_past

    def route(self, spec: LayerSpec) -> Route:
        """How the next step decodes. Before a packed one the ring must be flushed."""
        if self.packed:
            return "packed"
        if self.options.mode != "auto":
            return self.options.mode
        assert self.checkpoint is not None
        return ops.decode_route(self.checkpoint, self.options.ring_len, self.checkpoint.shape[0], spec.is_kda)

    def advance(self) -> None:
        """A replay step is done: the row's record was appended, or folded with the others at the ring's end."""
        assert self.cursor is not None
        self.cursor.add_(1).remainder_(self.options.ring_len)
        self._pending = True

    def flush(self) -> None:
        """Fold the ring into the checkpoint. Costs nothing when it is empty."""
        if self._pending and self.ring is not None:
            checkpoint, slots, cursor = self.rows(self.ring[0].shape[0])
            ops.flush(checkpoint, *self.ring, slots, cursor)
        self._forget()

    def _forget(self) -> None:
        if self._pending and self.cursor is not None:
            self.cursor.zero_()
        self._pending = False

    def reset(self) -> None:
        """Back to an empty sequence, memory kept."""
        self._forget()
        self.packed = self.options.mode == "packed"
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Permute the rows. Beam search does so at every step, where a ring saves nothing: from now on packed."""
        self.packed = True
        self._select(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (int or bool)."""
        self._select(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, in place."""
        self._select(lambda t: t.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the flushed state to the CPU."""
        home = self.device
        self._select(lambda t: t.to("cpu", non_blocking=True))
        self.device = home

    def prefetch(self) -> None:
        """Move the state back to the layer's own device."""
        home = self.device
        self._select(lambda t: t.to(home, non_blocking=True))

    def _select(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.flush()
        for i, conv in self.conv_states.items():
            if conv is not None:
                self.conv_states[i] = pick(conv)
        if self.checkpoint is not None:
            self._set_checkpoint(pick(self.checkpoint))


class ReplayCache(DynamicCache):
    """`past_key_values` for hybrid models: `DynamicCache` whose linear layers hold checkpoint and ring.

    Args:
        config: the model's config.
        ring_len: L, 1 … 64 decode steps between flushes.
        state_dtype: float32, bfloat16 or float16, as a name or a torch dtype; None follows the model's config and
            `REPLAYSSM_STATE_DTYPE`.
        mode: "replay", "packed" for no ring, or "auto", see `replayssm.enable`.

    Not needed after `replayssm.enable(model)`, which upgrades whatever cache the model meets; give one explicitly to
    use other options for one generation.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        ring_len: int = DEFAULT_RING_LEN,
        state_dtype: str | torch.dtype | None = None,
        mode: Mode = "auto",
    ) -> None:
        super().__init__(config=config)
        text = config.get_text_config(decoder=True)
        options = ReplayOptions.resolve(ring_len, state_dtype, mode, config_state_dtype(text))
        for i, layer in enumerate(self.layers):
            if type(layer) is LinearAttentionLayer:
                adopt(self, i, options)

    def flush(self) -> None:
        """Fold all rings, so that the checkpoints are the states."""
        for layer in self.layers:
            if isinstance(layer, ReplayLayer):
                layer.flush()


def adopt(cache: Cache, layer_idx: int, options: ReplayOptions) -> DecodeLayer:
    """The replay layer at `layer_idx` of any transformers cache, upgraded in place when it is a stock one.

    A stock layer that already holds a state keeps it. Raises `CacheStateError` when there is no linear-attention
    layer at that index.
    """
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if isinstance(layer, DecodeLayer):
        return layer
    if type(layer) is not LinearAttentionLayer:
        found = "nothing" if layer is None else type(layer).__name__
        raise CacheStateError(
            f"layer {layer_idx} of the cache is {found}, expected a linear-attention layer; "
            "create the cache with the model's config: DynamicCache(config=model.config)"
        )
    ours = ReplayLayer(options, layer.number_of_states)
    ours.record_past = layer.record_past
    ours.dtype, ours.device = layer.dtype, layer.device
    ours.conv_states = layer.conv_states
    ours.conv_kernel_size = layer.conv_kernel_size
    ours.is_conv_states_initialized = layer.is_conv_states_initialized
    ours.has_previous_state = layer.has_previous_state
    state = layer.recurrent_states[0]
    if state is not None:
        ours.update_recurrent_state(state)
    cache.layers[layer_idx] = ours
    return ours


def config_state_dtype(config: PreTrainedConfig) -> str | None:
    """What the model's config asks the state to be stored in (`mamba_ssm_dtype`), if anything."""
    value = getattr(config, "mamba_ssm_dtype", None)
    return None if value is None else str(value).removeprefix("torch.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _static(tensor: torch.Tensor) -> torch.Tensor:
    # A fixed address lets a compiled forward be replayed from a CUDA graph.
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor
