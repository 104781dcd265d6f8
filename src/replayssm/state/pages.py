"""Pages of the attention layers' caches: keys and values, latents, indexer keys, whatever a model keeps for a token.

A page holds `page_size` consecutive tokens of one request, in all layers. Forks share full pages, so a page has as many
owners as requests that read it, and is free when the last one lets go. Two pages more than can be allocated stand at
the end: `trash`, which padding rows write to, and `zeros`, which nobody writes to and which stands for what a row does
not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.errors import OptionError, PoolFullError, ShapeError, SlotError
from replayssm.state.host import upload


class TokenArray(NamedTuple):
    """What one layer keeps for a token, one of several arrays: `heads` vectors of `dim` values."""

    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.dim * self.dtype.itemsize


class PagePool:
    """`pages` pages of `page_size` tokens.

    Args:
        layers: arrays of each attention layer, in order.
        pages: how many can be allocated.
        page_size: tokens of one page.
        device: of all tensors.
        clear: whether pages are zeroed when they are handed out. A reader that multiplies what it must not see by zero
            would let the NaN of a former owner through.

    Attributes:
        arrays: per layer and array [(pages + 2)·page_size, heads, dim]; token t of page p is row p·page_size + t.
        trash, zeros: numbers of the two pages that are never handed out.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[TokenArray]],
        pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        clear: bool = False,
    ) -> None:
        if pages < 1 or page_size < 1:
            raise ShapeError(f"{pages} pages of {page_size} tokens hold nothing; both must be at least 1")
        self.pages, self.page_size, self.device = pages, page_size, torch.device(device)
        rows = (pages + 2) * page_size
        kinds = [one for layer in layers for one in layer]
        # one tensor for all arrays of a kind, so that a page is cleared in one launch
        whole = {
            kind: torch.zeros(kinds.count(kind), rows, kind.heads, kind.dim, dtype=kind.dtype, device=self.device)
            for kind in dict.fromkeys(kinds)
        }
        parts = {kind: iter(x) for kind, x in whole.items()}
        self.arrays = [[next(parts[kind]) for kind in layer] for layer in layers]
        self._all, self.clear = list(whole.values()), clear
        self.trash, self.zeros = pages, pages + 1
        self._free = deque(range(pages))
        self._owners: dict[int, int] = {}

    @staticmethod
    def page_bytes(layers: Sequence[Sequence[TokenArray]], page_size: int) -> int:
        """Bytes of one page in all layers."""
        return page_size * sum(one.nbytes for layer in layers for one in layer)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(x.nbytes for layer in self.arrays for x in layer)

    @property
    def free_pages(self) -> int:
        """How many can be allocated."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """How many are."""
        return len(self._owners)

    def owners(self, page: int) -> int:
        """How many read it; 0 for a free page."""
        return self._owners.get(page, 0)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_size)

    def can_allocate(self, count: int = 1) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= len(self._free)

    def allocate(self, count: int = 1) -> list[int]:
        """`count` distinct pages with one owner each. Raises `PoolFullError`, for a count below 0 `OptionError`.

        Their content is what a former owner left, or zeros with `clear`.
        """
        if count < 0:
            raise OptionError(f"{count} pages cannot be allocated; ask for 0 or more")
        if not self.can_allocate(count):
            raise PoolFullError(
                f"{count} pages asked for, {len(self._free)} of {self.pages} are free; wait for a request to end, or "
                "give the pool more memory"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._owners.update(dict.fromkeys(taken, 1))
        if self.clear and taken:
            rows = self._rows(taken)
            for x in self._all:
                x.index_fill_(1, rows, 0)
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """One more owner for each of these pages, which nobody may write to any more."""
        pages = self._live(pages)
        for page in pages:
            self._owners[page] += 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take one owner off each page. Raises `SlotError`, with nothing changed, for a page that has none."""
        for page in self._live(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                self._free.append(page)

    def copy(self, src: int, dst: int) -> None:
        """Copy one page in all layers."""
        source, target = (slice(page * self.page_size, (page + 1) * self.page_size) for page in self._live((src, dst)))
        for layer in self.arrays:
            for x in layer:
                x[target] = x[source]

    def offload(self, pages: Sequence[int]) -> list[list[Tensor]]:
        """Their content on the CPU, per layer and array [pages·page_size, heads, dim]. Waits for the device."""
        rows = self._rows(self._live(pages))
        return [[x.index_select(0, rows).to("cpu") for x in layer] for layer in self.arrays]

    def restore(self, pages: Sequence[int], saved: Sequence[Sequence[Tensor]]) -> None:
        """Put a saved content into as many allocated pages."""
        rows = self._rows(self._live(pages))
        for layer, theirs in zip(self.arrays, saved, strict=True):
            for x, one in zip(layer, theirs, strict=True):
                if one.shape[0] != len(rows):
                    raise ShapeError.mismatch("saved pages", list(one.shape), [len(rows), *x.shape[1:]])
                x.index_copy_(0, rows, one.to(self.device))

    def check(self) -> None:
        """The books: every page is free or owned, and once. Raises `SlotError`."""
        found = sorted([*self._free, *self._owners])
        if found != list(range(self.pages)):
            raise SlotError(f"{self.pages} pages, but free and owned ones together are {found}")

    def _rows(self, pages: Sequence[int]) -> Tensor:
        first = upload(pages, torch.int64, self.device)[:, None] * self.page_size
        return (first + torch.arange(self.page_size, device=self.device)).flatten()

    def _live(self, pages: Iterable[int]) -> list[int]:
        """Plain numbers of pages that are in use, each named once."""
        pages = [int(page) for page in pages]
        for page in pages:
            if page not in self._owners:
                known = 0 <= page < self.pages
                raise SlotError(f"page {page} {'is free' if known else f'is outside 0…{self.pages - 1}'}")
        if len(set(pages)) < len(pages):
            raise SlotError(f"pages {pages} name one twice")
        return pages
