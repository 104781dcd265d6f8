"""Decode steps as CUDA graphs: one for each batch bucket, context bucket and route, recorded when first needed.

A graph is recorded on padding rows alone (slot -1), so neither the warm-up nor the recording touches a request's slot
or page. Which graph a step takes depends on how many rows and pages it has, on nothing that the device knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.kernels.policy import Route

log = logging.getLogger(__name__)
SMALLEST_CONTEXT = 256  # tokens; gathered contexts are rounded up to this times a power of two


class DecodeInputs(NamedTuple):
    """What a decode step of B rows takes, in device memory: [B] each.

    `tokens` int64, -1 for the one that the step before sampled; `positions` int64; `slots` int32, -1 for padding.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor

    @staticmethod
    def padding(rows: int, device: torch.device, width: int = 1) -> DecodeInputs:
        """Rows that touch nothing."""
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        return DecodeInputs(zeros, zeros.clone(), torch.full((rows,), -1, dtype=torch.int32, device=device))

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return 1


class WindowInputs(NamedTuple):
    """What a step of B windows takes: `tokens` [B, T] int64, of which the first `lengths` [B] int32 count; `positions`
    of the first ones and `slots` as in `DecodeInputs`."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor

    @staticmethod
    def padding(rows: int, device: torch.device, width: int = 1) -> WindowInputs:
        """Rows that touch nothing."""
        _, positions, slots = DecodeInputs.padding(rows, device)
        tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        return WindowInputs(tokens, positions, slots, torch.zeros_like(slots))

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.tokens.shape[1]


Inputs = DecodeInputs | WindowInputs


class Recorded(NamedTuple):
    """A graph with its own inputs, and the logits [bucket · width, vocabulary] that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    logits: Tensor


Forward = Callable[[Any, int, Route], Tensor]


class Graphs:
    """Replays `forward(inputs, pages, route)`, or for windows `window`, of up to `most` rows and `least_pages` to
    `most_pages` pages.

    A model that cannot be recorded (a layer asks the device for a number) runs without graphs, which is logged once.
    """

    def __init__(
        self, forward: Forward, most: int, least_pages: int, most_pages: int, device: torch.device, window: Forward
    ) -> None:
        self.forwards: dict[type[Inputs], Forward] = {DecodeInputs: forward, WindowInputs: window}
        self.device = device
        self.buckets = batch_buckets(most)
        self.most_pages, self.least_pages = most_pages, least_pages
        self.failure: str | None = None
        self.pool = torch.cuda.graph_pool_handle()
        self.recorded: dict[tuple[type[Inputs], int, int, int, Route], Recorded] = {}

    def bucket(self, rows: int) -> int:
        """Rows of the graph that a batch of `rows` takes."""
        return next(bucket for bucket in self.buckets if bucket >= rows)

    def pages(self, pages: int) -> int:
        """Pages of the graph that contexts of `pages` pages take."""
        return min(self.most_pages, max(self.least_pages, 1 << (pages - 1).bit_length()))

    def run(self, inputs: Inputs, pages: int, route: Route) -> Tensor:
        """Logits [B · width, vocabulary]; valid until the next step of the same graph."""
        rows = inputs.slots.shape[0]
        key = type(inputs), inputs.width, self.bucket(rows), self.pages(pages), route
        if key not in self.recorded and self.failure is None:
            try:
                self.recorded[key] = self._record(*key)
            except RuntimeError as error:
                self.failure = str(error).splitlines()[0]
                log.warning("decode runs without CUDA graphs: %s", self.failure)
        if self.failure is not None:
            return self.forwards[type(inputs)](inputs, pages, route)
        graph, held, logits = self.recorded[key]
        for mine, theirs in zip(held, inputs, strict=True):
            mine[:rows].copy_(theirs)
        if rows < held.slots.shape[0]:
            held.slots[rows:].fill_(-1)
        graph.replay()
        return logits[: rows * inputs.width]

    def _record(self, kind: type[Inputs], width: int, rows: int, pages: int, route: Route) -> Recorded:
        log.debug("recording a decode step of %d rows of %d tokens, %d pages, %s", rows, width, pages, route)
        inputs, forward = kind.padding(rows, self.device, width), self.forwards[kind]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # whatever allocates or compiles once does it here
            for _ in range(2):
                forward(inputs, pages, route)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = forward(inputs, pages, route)
        return Recorded(graph, inputs, logits)


def batch_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64 and of 32 beyond, up to `most`."""
    usual = [1, 2, 4, *range(8, 64, 8), *range(64, most + 32, 32)]
    return sorted({min(size, most) for size in usual})
