"""Geometry of a linear-attention layer, of its ring, and the bytes both cost. Needs no torch.

Symbols, used throughout the package: H key heads, HV value heads (H divides HV), K key dim, V value dim,
L ring length. Value head hv reads key head hv // (HV / H). The recurrent state of one slot is [HV, V, K].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from replayssm.errors import DtypeError, OptionError, RingLengthError, ShapeError

Kind = Literal["gdn", "kda"]
SpecState = Literal["ring", "snapshot", "kv-replay", "fold"]  # how drafts are verified, see `replayssm.engine.windows`

RING_LEN_MIN, RING_LEN_MAX = 1, 64
HEAD_DIM_MAX = 256
DEFAULT_RING_LEN = 8
STATE_DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Array(NamedTuple):
    """Shape and dtype name of a tensor that a caller allocates."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        size = DTYPE_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


class RingArrays(NamedTuple):
    """The three caches of a ring, see `ring_arrays`."""

    d: Array
    k: Array
    g: Array

    @property
    def nbytes(self) -> int:
        """Size of all three."""
        return sum(a.nbytes for a in self)


@dataclass(frozen=True)
class LayerSpec:
    """One linear-attention layer. Raises `ShapeError` or `OptionError` when it cannot be served.

    `lower_bound` (< 0) marks KDA with a bounded gate; `beta_scale` is 2 where beta lies in (0, 2).
    """

    kind: Kind
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    lower_bound: float | None = None
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("gdn", "kda"):
            raise OptionError(f"layer kind {self.kind!r} is unknown; use 'gdn' or 'kda'")
        h, hv = self.num_k_heads, self.num_v_heads
        if h < 1 or hv < 1 or hv % h:
            raise ShapeError(f"{h} key heads do not divide {hv} value heads; each key head serves HV/H value heads")
        for name, dim in (("key head dim K", self.head_k_dim), ("value head dim V", self.head_v_dim)):
            if not 1 <= dim <= HEAD_DIM_MAX:
                raise ShapeError(f"{name} = {dim} is outside 1…{HEAD_DIM_MAX}")
        if self.lower_bound is not None and (self.kind != "kda" or not self.lower_bound < 0):
            raise OptionError(
                f"gate lower bound {self.lower_bound} (kind {self.kind!r}) needs kind 'kda' and must be < 0"
            )

    @property
    def is_kda(self) -> bool:
        """Whether each key channel has its own decay."""
        return self.kind == "kda"

    @property
    def qkv_dim(self) -> int:
        """Width of the packed q | k | v row, which is also the conv width."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def state_array(self, slots: int = 1, dtype: str = "float32") -> Array:
        """Checkpoint [slots, HV, V, K]."""
        check_state_dtype(dtype)
        return Array((slots, self.num_v_heads, self.head_v_dim, self.head_k_dim), dtype)

    def conv_array(self, slots: int = 1, dtype: str = "bfloat16") -> Array:
        """Conv state [slots, qkv_dim, kernel - 1]: the newest input is the last column."""
        return Array((slots, self.qkv_dim, self.conv_kernel - 1), dtype)

    def ring_arrays(self, ring_len: int, slots: int = 1, io_dtype: str = "bfloat16") -> RingArrays:
        """What a caller allocates for the ring: d [slots, HV, L, V] fp32, k [slots, H, L, K] in the activation
        dtype, g [slots, HV, L] (GDN) or [slots, HV, L, K] (KDA) fp32. Their content is private to the ops."""
        check_ring_len(ring_len)
        h, hv, k, v = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        g = (slots, hv, ring_len, k) if self.is_kda else (slots, hv, ring_len)
        return RingArrays(
            Array((slots, hv, ring_len, v), "float32"),
            Array((slots, h, ring_len, k), io_dtype),
            Array(g, "float32"),
        )

    def window_arrays(self, strategy: SpecState, tokens: int, state_dtype: str, io_dtype: str) -> dict[str, Array]:
        """Buffers of one request for a window of `tokens` tokens, the newest one and its drafts, beside its slot:

        the inputs of the conv, x; for `snapshot` the state after each token; for `kv-replay` what each token gave to
        the recurrence."""
        found = {"x": Array((tokens, self.qkv_dim), io_dtype)}
        if strategy == "snapshot":
            _, *state = self.state_array(1, state_dtype).shape
            found["snapshots"] = Array((tokens, *state), state_dtype)
        elif strategy == "kv-replay":
            hv = self.num_v_heads
            found["mixed_qkv"] = Array((tokens, self.qkv_dim), io_dtype)
            found["a"] = Array((tokens, hv, self.head_k_dim) if self.is_kda else (tokens, hv), io_dtype)
            found["b"] = Array((tokens, hv), io_dtype)
        return found

    def record_bytes(self, io_dtype: str = "bfloat16") -> int:
        """Bytes of one ring record (d, k, g) of one slot."""
        return self.ring_arrays(1, 1, io_dtype).nbytes


class Traffic(NamedTuple):
    """Bytes that one layer must move for one token of one request."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Read and written."""
        return self.read + self.written


def packed_traffic(spec: LayerSpec, state_dtype: str = "float32") -> Traffic:
    """Packed decode reads and writes the whole state."""
    size = spec.state_array(1, state_dtype).nbytes
    return Traffic(size, size)


def replay_traffic(spec: LayerSpec, ring_len: int, state_dtype: str = "float32", io_dtype: str = "bfloat16") -> Traffic:
    """Replay decode, averaged over a ring period of L steps.

    Step n = 0 … L-1 reads the checkpoint and n records; steps n < L-1 write one record, step L-1 writes the
    checkpoint. Mean: read |S| + (L-1)/2·r, written |S|/L + (L-1)/L·r, with r the bytes of a record.
    """
    check_ring_len(ring_len)
    size, rec = spec.state_array(1, state_dtype).nbytes, spec.record_bytes(io_dtype)
    return Traffic(size + (ring_len - 1) / 2 * rec, (size + (ring_len - 1) * rec) / ring_len)


def check_ring_len(ring_len: int) -> int:
    """Return `ring_len`, or raise `RingLengthError` outside 1 … 64."""
    if isinstance(ring_len, bool) or not isinstance(ring_len, int) or not RING_LEN_MIN <= ring_len <= RING_LEN_MAX:
        raise RingLengthError(ring_len, RING_LEN_MIN, RING_LEN_MAX)
    return ring_len


def ring_of(strategy: SpecState, ring_len: int, tokens: int) -> int | None:
    """Length of the ring that a slot has for windows of `tokens` tokens; None for no ring."""
    return {"ring": ring_len, "fold": tokens}.get(strategy)


def ring_for(tokens: int) -> int:
    """A ring for windows of `tokens` tokens where nobody names its length: the power of two that holds three of them.

    That is 16 for 4 drafts, the length that was measured. A ring that one window nearly fills folds at every step.
    """
    return max(DEFAULT_RING_LEN, min(RING_LEN_MAX, 1 << (3 * tokens - 1).bit_length()))


def check_window(strategy: SpecState, drafts: int, ring_len: int) -> None:
    """Raise `OptionError` when a step cannot verify so many drafts."""
    tokens = drafts + 1
    if tokens >= RING_LEN_MAX:
        raise OptionError(f"spec_tokens {drafts} is more than a step can verify; use 1…{RING_LEN_MAX - 2}")
    if strategy == "ring" and tokens >= ring_len:
        fewer = f", or spec_tokens up to {ring_len - 2}" if ring_len > 2 else ""
        raise OptionError(
            f"spec_tokens {drafts} makes a window of {tokens} tokens, which leaves no room in a ring of {ring_len}; "
            f"use ring_len {tokens + 1} or more{fewer}"
        )


def check_state_dtype(dtype: str) -> str:
    """Return `dtype`, or raise `DtypeError` when a state cannot be stored in it."""
    if dtype not in STATE_DTYPES:
        raise DtypeError.unsupported("recurrent state", dtype, STATE_DTYPES)
    return dtype
