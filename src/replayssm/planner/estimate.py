"""The arithmetic of a plan: bytes of a request, bytes of a step, the best ring length, requests that fit.

All sizes are whole bytes of one shard. The derivations are in docs/mathematics.md, section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Literal, NamedTuple

from replayssm.errors import MemoryBudgetError
from replayssm.planner.checkpoints import Geometry
from replayssm.spec import (
    DTYPE_BYTES,
    RING_LEN_MAX,
    RING_LEN_MIN,
    LayerSpec,
    SpecState,
    Traffic,
    check_ring_len,
    check_window,
    packed_traffic,
    replay_traffic,
    ring_of,
)

Mode = Literal["packed", "replay"]
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True)
class Settings:
    """How the model is served: ring length, dtypes, tokens that attention caches for a request."""

    ring_len: int = 8
    state_dtype: str = "float32"
    io_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    context: int = 4096


class RequestBytes(NamedTuple):
    """What one request holds in memory; `kv` grows with the context, the others do not.

    `drafts` are buffers for windows while they are verified. The cursor, 4 bytes, is left out.
    """

    state: int
    ring: int
    conv: int
    kv: int
    drafts: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def layer_bytes(geometry: Geometry, settings: Settings) -> RequestBytes:
    """One linear layer (state, ring, conv) and one attention layer (kv) of one request, replay decode."""
    spec = geometry.spec
    return RequestBytes(
        spec.state_array(1, settings.state_dtype).nbytes,
        spec.ring_arrays(settings.ring_len, 1, settings.io_dtype).nbytes,
        spec.conv_array(1, settings.io_dtype).nbytes,
        settings.context * geometry.attention.values_per_token * KV_BYTES[settings.kv_dtype],
    )


def request_bytes(geometry: Geometry, settings: Settings, mode: Mode) -> RequestBytes:
    """All layers of one request, without drafts."""
    linear, one = geometry.linear_layers, layer_bytes(geometry, settings)
    ring = one.ring if mode == "replay" else 0
    return RequestBytes(linear * one.state, linear * ring, linear * one.conv, geometry.attention.layers * one.kv)


def spec_bytes(geometry: Geometry, settings: Settings, strategy: SpecState, drafts: int) -> RequestBytes:
    """All layers of one request that the engine verifies up to `drafts` drafts of in a step, a window of drafts + 1:

    * all keep one state and the conv's inputs of the window;
    * `ring`: the ring of `settings.ring_len` records, which must hold more than the window (`OptionError` otherwise);
    * `snapshot`: a state after each token of the window, any of which may turn out to be the one to go on from;
    * `kv-replay`: what each token of the window gave to the recurrence;
    * `fold`: a ring as long as the window.
    """
    check_window(strategy, drafts, settings.ring_len)
    spec, linear, window = geometry.spec, geometry.linear_layers, drafts + 1
    buffers = spec.window_arrays(strategy, window, settings.state_dtype, settings.io_dtype).values()
    length = ring_of(strategy, settings.ring_len, window)
    ring = 0 if length is None else spec.ring_arrays(length, 1, settings.io_dtype).nbytes
    held = request_bytes(geometry, settings, "packed")
    return held._replace(ring=linear * ring, drafts=linear * sum(array.nbytes for array in buffers))


def step_traffic(
    geometry: Geometry, settings: Settings, mode: Mode, batch: int = 1, ring_len: int | None = None
) -> Traffic:
    """State and ring bytes of one decode step of `batch` rows, all linear layers; replay averaged over a period."""
    one = layer_traffic(geometry.spec, settings, mode, ring_len)
    rows = batch * geometry.linear_layers
    return Traffic(rows * one.read, rows * one.written)


def layer_traffic(spec: LayerSpec, settings: Settings, mode: Mode, ring_len: int | None = None) -> Traffic:
    """The same of one layer and row."""
    if mode == "packed":
        return packed_traffic(spec, settings.state_dtype)
    return replay_traffic(spec, ring_len or settings.ring_len, settings.state_dtype, settings.io_dtype)


class DominantTraffic(NamedTuple):
    """Bytes of one head and step where only terms of size V·K count."""

    packed: int
    replay: int


def dominant_traffic(head_v_dim: int, head_k_dim: int, state_dtype: str = "float32") -> DominantTraffic:
    """The simplest estimate: packed reads and writes the state, 2·4·V·K bytes in fp32; replay reads it, 4·V·K.

    Records are vectors and left out, the fold is spread over so many steps that it does not count. `replay_traffic`
    tends to it as V, K and L grow, L slower than V and K.
    """
    state = DTYPE_BYTES[state_dtype] * head_v_dim * head_k_dim
    return DominantTraffic(2 * state, state)


def period_bytes(spec: LayerSpec, ring_len: int, state_dtype: str = "float32", io_dtype: str = "bfloat16") -> int:
    """Bytes that one layer and row moves over a whole ring period of L steps: `replay_traffic` times L, exactly."""
    size, record = spec.state_array(1, state_dtype).nbytes, spec.record_bytes(io_dtype)
    steps = check_ring_len(ring_len)
    return steps * size + steps * (steps - 1) // 2 * record + (steps - 1) * record + size


def best_ring_len(spec: LayerSpec, state_dtype: str = "float32", io_dtype: str = "bfloat16") -> int:
    """The L of 1 … 64 that moves the fewest bytes a step, by trying all; the shortest of equals."""
    lengths = range(RING_LEN_MIN, RING_LEN_MAX + 1)
    return min(lengths, key=lambda n: Fraction(period_bytes(spec, n, state_dtype, io_dtype), n))


def best_ring_len_formula(spec: LayerSpec, state_dtype: str = "float32", io_dtype: str = "bfloat16") -> int:
    """The same in closed form: the least L with L·(L+1) ≥ 2(|S|/r − 1), within 1 … 64."""
    size, record = spec.state_array(1, state_dtype).nbytes, spec.record_bytes(io_dtype)
    if size <= record:
        return RING_LEN_MIN
    product = -(-2 * (size - record) // record)  # rounded up, which changes nothing for whole L
    length = (isqrt(4 * product + 1) - 1) // 2
    length += length * (length + 1) < product
    return min(max(length, RING_LEN_MIN), RING_LEN_MAX)


def best_ring_len_real(spec: LayerSpec, state_dtype: str = "float32", io_dtype: str = "bfloat16") -> float:
    """√(2(|S|/r − 1)), where the bytes of a step have their minimum over real L; 1 where that is smaller."""
    size, record = spec.state_array(1, state_dtype).nbytes, spec.record_bytes(io_dtype)
    return float(max(1.0, 2 * (size / record - 1)) ** 0.5)


@dataclass(frozen=True)
class Budget:
    """Memory of one shard and what of it is taken before the first request, in bytes."""

    memory: int
    weights: int = 0
    reserve: int = 0

    def requests(self, per_request: int) -> int:
        """How many requests of `per_request` bytes fit beside the rest.

        Raises `MemoryBudgetError` when weights and reserve alone are more than the memory.
        """
        free = self.memory - self.weights - self.reserve
        if free < 0:
            raise MemoryBudgetError(self.memory, self.weights, self.reserve)
        return free // per_request
