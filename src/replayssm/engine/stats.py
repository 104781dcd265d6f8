"""What an engine did, in numbers that only grow, and what its rings hold now. Read from any thread, written by one.

Cursors live on the device; what they are is known on the host all the same, since a ring fills by one record a step and
folds when it is full or told to. `RingMeter` keeps that account, so that nobody has to wait for the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from replayssm.engine.options import SpecState
from replayssm.engine.request import Request
from replayssm.engine.scheduler import Step
from replayssm.ops.traffic import record_bytes, state_bytes
from replayssm.state import SlotPool

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
)  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Histogram:
    """Counts of values at most as large as each bound, and above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class RingMeter:
    """Fill of every ring, and the bytes that replay moved against those of packed decode.

    Attributes:
        fill: records in the ring of a slot, where there are any.
        replay_rows, packed_rows: rows of decode steps, by route.
        window_rows, window_tokens: rows of steps that verified drafts, and tokens that were kept of them.
        flushes: rings folded, in a decode step or outside one.
        moved: bytes of state and ring, all layers, that decode moved, folds outside of it included.
    """

    def __init__(self, slots: SlotPool, snapshot_interval: int = 0) -> None:
        self.ring_len, self._interval = slots.ring_len, snapshot_interval
        self._state = state_bytes(slots.state)
        self._record = 0
        if slots.d is not None and slots.k is not None and slots.g is not None:
            self._record = record_bytes(slots.d, slots.k, slots.g)
        self.fill: dict[int, int] = {}
        self.replay_rows = self.packed_rows = self.window_rows = self.window_tokens = self.flushes = self.moved = 0

    @property
    def saved(self) -> int:
        """Bytes that packed decode of the same tokens would have moved besides."""
        return 2 * self._state * (self.replay_rows + self.packed_rows + self.window_tokens) - self.moved

    def packed(self, rows: int) -> None:
        """A packed step."""
        self.packed_rows += rows
        self.moved += 2 * self._state * rows

    def replay(self, requests: Iterable[Request]) -> None:
        """A replay step, before it runs; folds where `Runner._flushing` says so."""
        assert self.ring_len is not None
        for request in requests:
            slot, position = request.slot, request.length - 1
            records = self.fill.get(slot, 0)
            due = (position + slot) % self.ring_len == 0
            if self._interval:
                due |= (position + 1) % self._interval == 0
            self.replay_rows += 1
            self.moved += self._state + records * self._record
            if due or records == self.ring_len - 1:
                self.flushes += 1
                self.moved += self._state
                self.fill[slot] = 0
            else:
                self.moved += self._record
                self.fill[slot] = records + 1

    def window(self, requests: Sequence[Request], lengths: Sequence[int], strategy: SpecState) -> None:
        """A step of windows, before it runs; those on a ring fold where they might fill it."""
        for request, length in zip(requests, lengths, strict=True):
            records = self.fill.get(request.slot, 0)
            self.window_rows += 1
            self.moved += self._state + records * self._record
            if strategy == "snapshot":
                self.moved += length * self._state
            elif strategy == "ring":
                assert self.ring_len is not None
                self.moved += length * self._record
                if records + length >= self.ring_len:
                    self.flushes += records > 0
                    self.moved += self._state * (records > 0)
                    records = 0
                self.fill[request.slot] = records

    def commit(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """What is kept of windows: those on a ring have records of it, the others a new state."""
        for request, count in zip(requests, accepted, strict=True):
            self.window_tokens += count
            if not count:
                continue
            if request.slot in self.fill:
                self.fill[request.slot] += count
            else:
                self.moved += 2 * self._state

    def flush(self, slots: Iterable[int]) -> None:
        """Folds outside a decode step."""
        for slot in slots:
            if records := self.fill.pop(slot, 0):
                self.flushes += 1
                self.moved += 2 * self._state + records * self._record

    def forget(self, slot: int) -> None:
        """A slot was given back."""
        self.fill.pop(slot, None)


@dataclass
class EngineStats:
    """Counts since the start.

    Attributes:
        finished: outputs by reason.
        prompt_tokens: computed, also those of prompts computed again; `cached_tokens` were taken over instead.
        generated_tokens: of all outputs.
        preemptions: requests that had to make room.
        drafted, drafts_kept: tokens that were guessed, and those of them that the model took.
        batch: decode rows of steps that had any.
        ttft, itl, e2e: seconds from arrival to the first token, between tokens, to the end.
    """

    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    drafts_kept: int = 0
    batch: Histogram = field(default_factory=lambda: Histogram(SIZES))
    ttft: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    itl: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    e2e: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def step(self, step: Step) -> None:
        """A step that was launched."""
        if step.decode:
            self.batch.add(len(step.decode))
        self.prompt_tokens += sum(chunk.length for chunk in step.prefill)

    def token(self, request: Request, now: float) -> None:
        """A token that was read, before the request hears of it."""
        self.generated_tokens += 1
        if request.last_token is None:
            self.ttft.add(now - request.arrived)
        else:
            self.itl.add(now - request.last_token)

    def drafts(self, drafted: int, kept: int) -> None:
        """A window that was read."""
        self.drafted += drafted
        self.drafts_kept += kept

    def finish(self, request: Request, reason: str, now: float) -> None:
        """An output that ended."""
        self.finished[reason] += 1
        self.cached_tokens += request.cached_tokens
        self.preemptions += request.preemptions
        self.e2e.add(now - request.arrived)
