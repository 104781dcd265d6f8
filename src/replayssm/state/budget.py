"""How the memory of a device is split before anything is allocated, so that nothing has to grow later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from replayssm.errors import MemoryBudgetError, OptionError

EXPECTED_TOKENS = 2048  # of a request, where the user names no number of requests

REMEDY = "give more of it (memory), or ask for fewer requests (max_requests), a shorter context or smaller chunk_tokens"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. `slots` requests decode at once; `pages` pages hold `pages · page_size` tokens together.

    Attributes:
        budget: bytes that may be used in all.
        weights: of the model.
        work: activations, logits, the sampler's and graphs' memory, at the largest step.
        slot_bytes: state, conv window, ring and cursor of one request, all layers.
        ring_bytes: the ring's part of it.
        conv_bytes: the conv window's part of it.
        page_bytes: one page, all attention layers.
        slots, reserved_slots: for running requests, and for the prefix cache.
        pages, page_size: pages, and tokens of one.
        kept_bytes: one state of the prefix cache, which has no ring.
        draft_bytes: the part of `slot_bytes` that is for drafts while they are verified.
    """

    budget: int
    weights: int
    work: int
    slot_bytes: int
    ring_bytes: int
    conv_bytes: int
    page_bytes: int
    slots: int
    reserved_slots: int
    pages: int
    page_size: int
    kept_bytes: int
    draft_bytes: int = 0

    @property
    def tokens(self) -> int:
        """That fit into the pages."""
        return self.pages * self.page_size

    @property
    def used(self) -> int:
        """Bytes of everything; at most `budget`."""
        slots = self.slots * self.slot_bytes + self.reserved_slots * self.kept_bytes
        return self.weights + self.work + slots + (self.pages + 2) * self.page_bytes

    def split(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of each part, `unused` last."""
        yield "weights", self.weights
        yield "activations, sampler, graphs", self.work
        beside = self.ring_bytes + self.conv_bytes + self.draft_bytes
        yield "recurrent state", self.slots * (self.slot_bytes - beside)
        yield "ring", self.slots * self.ring_bytes
        yield "conv windows", self.slots * self.conv_bytes
        if self.draft_bytes:
            yield "windows of drafts", self.slots * self.draft_bytes
        yield "prefix cache states", self.reserved_slots * self.kept_bytes
        yield "keys and values", (self.pages + 2) * self.page_bytes
        yield "unused", self.budget - self.used


def plan_memory(
    budget: int,
    weights: int,
    work: int,
    slot_bytes: int,
    ring_bytes: int,
    conv_bytes: int,
    page_bytes: int,
    page_size: int,
    context: int,
    max_requests: int,
    requests: int | None = None,
    prefix_share: float = 0.0,
    kept_bytes: int | None = None,
    least_kept: int = 0,
    draft_bytes: int = 0,
) -> MemoryPlan:
    """Split `budget` bytes.

    Weights and work come first, then `prefix_share` of the rest for the prefix cache's states. What is left goes to
    slots and pages: `requests` slots where that number is given, else as many as fit when each request brings
    `EXPECTED_TOKENS` tokens (fewer if `context` is smaller), `max_requests` at most. All remaining bytes are pages,
    but never more than every slot could fill.

    Raises `MemoryBudgetError` when not even one request with one page fits, `OptionError` for a share outside [0, 1),
    or for one that holds fewer than `least_kept` states.
    """
    if not 0 <= prefix_share < 1:
        raise OptionError(f"prefix_share {prefix_share} is outside [0, 1)")
    rest = budget - weights - work

    def too_small(slots: int) -> MemoryBudgetError:
        needed = work + slots * slot_bytes + 3 * page_bytes
        return MemoryBudgetError(budget, weights, needed, REMEDY)

    if rest < slot_bytes + 3 * page_bytes:
        raise too_small(1)
    kept = slot_bytes if kept_bytes is None else kept_bytes
    shared = rest - slot_bytes - 3 * page_bytes
    reserved = int(shared * prefix_share) // kept
    if reserved < least_kept:
        share = math.ceil(1000 * least_kept * kept / shared) / 1000 if shared else 1.0
        remedy = f"the smallest that works is {share:.3f}" if share < 1 else f"more memory is needed; {REMEDY}"
        raise OptionError(
            f"prefix_share {prefix_share} of {shared / 2**20:.1f} MiB holds {reserved} states of {kept / 2**20:.1f} "
            f"MiB, the prefix cache needs at least {least_kept}; {remedy}"
        )
    rest -= reserved * kept + 2 * page_bytes
    expected = -(-min(context, EXPECTED_TOKENS) // page_size)
    most = min(max_requests, (rest - page_bytes) // slot_bytes)
    slots = min(most, max(1, rest // (slot_bytes + expected * page_bytes)))
    if requests is not None:
        slots = requests
        if requests > most:
            raise too_small(requests)
    if slots < 1:
        raise too_small(1)
    # a budget with nothing but states (no attention layer) still needs a few pages for the books
    pages = slots * -(-context // page_size)
    if page_bytes:
        pages = min(pages, (rest - slots * slot_bytes) // page_bytes)
    return MemoryPlan(
        budget,
        weights,
        work,
        slot_bytes,
        ring_bytes,
        conv_bytes,
        page_bytes,
        slots,
        reserved,
        pages,
        page_size,
        kept,
        draft_bytes,
    )
