"""Who guesses the next tokens of a request. A guess costs little and may be wrong; the model decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replayssm.engine.request import Request


class Drafter(Protocol):
    """Proposes tokens behind the newest one of each request."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """Up to `most` tokens for each request, whose tokens have all been read."""
        ...

    def follow(self, request: Request, kept: int) -> None:
        """A step of the request was read, and `kept` tokens of it stay: of a window, or the one that was sampled."""
        ...

    def forget(self, request: Request) -> None:
        """A request left its slot."""
        ...


class NgramDrafter:
    """Prompt lookup (Saxena 2023): what followed the newest tokens when they stood in the text before.

    The longest of the n-grams decides, at its latest earlier place. Each request has a table of its own, which grows by
    a few entries a token.

    Args:
        longest, shortest: tokens of the n-grams that are tried.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._tables: dict[Request, _Table] = {}

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        return [self._one(request, count) if count else [] for request, count in zip(requests, most, strict=True)]

    def follow(self, request: Request, kept: int) -> None:
        """See `Drafter`. The text says it all."""

    def forget(self, request: Request) -> None:
        """See `Drafter`."""
        self._tables.pop(request, None)

    def _one(self, request: Request, most: int) -> list[int]:
        table = self._tables.setdefault(request, _Table())
        tokens = request.tokens
        table.grow(tokens, self.sizes)
        for size in self.sizes:
            if size < len(tokens) and (at := table.places.get(tokens[-size:].tobytes())) is not None:
                return tokens[at : at + most].tolist()
        return []


class _Table:
    """Where each n-gram of a text ended last, not counting its very end."""

    def __init__(self) -> None:
        self.places: dict[bytes, int] = {}
        self.known = 0

    def grow(self, tokens: Sequence[int], sizes: Sequence[int]) -> None:
        """Enter the n-grams that end before the newest token."""
        for end in range(max(1, self.known), len(tokens)):
            for size in sizes:
                if size <= end:
                    self.places[tokens[end - size : end].tobytes()] = end  # type: ignore[attr-defined]
        self.known = len(tokens)
