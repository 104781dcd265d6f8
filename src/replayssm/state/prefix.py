"""Prefixes that were computed before: keys and values in pages, and recurrent states at some depths.

A tree in which every edge is a whole page of tokens. A node owns its page, and may own a state: the one after all
tokens down to it. A state at a depth that is no multiple of the page size hangs at the node above it as a *tail*, with
a page of its own that is filled in part. Attention alone could continue anywhere, a recurrent layer only where a state
lies. So a match is as deep as the deepest state on the way; pages below that serve whoever computes that state again.

A cached page or state is never written. `adopt` copies the state to the request's slot and the tail's page to one of
its own; whole pages are shared. States have a pool of their own without rings: `insert` folds the ring on the way there
(`materialize`), and the request decodes on as if nothing had happened.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from replayssm.errors import CacheStateError
from replayssm.state.pages import PagePool
from replayssm.state.pool import SlotPool

Key = bytes  # tokens, `WIDE` bytes each: hashed and compared in one go
WIDE = array("i").itemsize
Below = dict[Key, "Place"]
_NOTHING: Below = {}


class Place:
    """A depth of the tree: a whole page below `parent`, or the tail of one. `state` is a slot of the cache's pool."""

    __slots__ = ("children", "depth", "key", "page", "parent", "state", "tails")

    def __init__(self, key: Key, page: int, parent: Place | None, depth: int) -> None:
        self.key, self.page, self.parent, self.depth = key, page, parent, depth
        self.state: int | None = None
        self.children: Below = _NOTHING  # dicts of their own when there is something to put in
        self.tails: Below = _NOTHING

    @property
    def bare(self) -> bool:
        """Nothing hangs below."""
        return not (self.children or self.tails)


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as the tree compares them."""
    return (tokens if isinstance(tokens, array) else array("i", tokens)).tobytes()


class Match(NamedTuple):
    """The deepest usable prefix: `depth` tokens, whose state lies at `place`; None and 0 where there is none.
    `pages_depth` tokens had pages."""

    depth: int
    place: Place | None
    pages_depth: int


class _Source(NamedTuple):
    """Where a state comes from: a running request's slot, at its last fold or as it is, and states to put it into."""

    slot: int
    folded: bool
    buffers: list[int] | None


@dataclass
class PrefixStats:
    """Counts since the start, in tokens where not said otherwise.

    Attributes:
        asked: of all requests that looked.
        pages_hit: that had pages.
        hit: that were taken over, with a state.
        requests, requests_hit: that looked, and that took over something.
        snapshots: states that were put in.
        states_evicted, pages_evicted: to make room.
    """

    asked: int = 0
    pages_hit: int = 0
    hit: int = 0
    requests: int = 0
    requests_hit: int = 0
    snapshots: int = 0
    states_evicted: int = 0
    pages_evicted: int = 0


class PrefixCache:
    """Prefixes of the requests that run on `slots` and `pages`.

    Args:
        slots: of running requests.
        pages: of running requests and of this cache; both take from the same.
        states: a pool of the same layers and dtypes without rings; its slots are the budget for states.
    """

    def __init__(self, slots: SlotPool, pages: PagePool, states: SlotPool) -> None:
        if states.ring_len is not None:
            raise CacheStateError("the cache's states are folded; give it a pool without rings (ring_len=None)")
        self.slots, self.pages, self.states = slots, pages, states
        self.root = Place(b"", -1, None, 0)
        self.stats = PrefixStats()
        self.reserved = 0  # states that running requests hold for what comes
        # oldest first; a place is never older than what hangs below it
        self._used: OrderedDict[Place, None] = OrderedDict()
        self._stated: OrderedDict[Place, None] = OrderedDict()

    def match(self, tokens: Sequence[int], most: int | None = None) -> Match:
        """The deepest prefix of `tokens` with a state, `most` tokens at most. Counts as a use of it.

        An array("i") of tokens is taken as it is, other sequences are copied to one.
        """
        raw = packed(tokens)
        limit = len(tokens) if most is None else min(most, len(tokens))
        place, best, depth = self.root, None, 0
        step = self.pages.page_size * WIDE
        for at in range(0, limit // self.pages.page_size * step, step):
            if place.tails:
                best = self._tail(place, raw, limit, best)
            child = place.children.get(raw[at : at + step])
            if child is None:
                break
            place = child
            if child.state is not None:
                best = child
        else:
            best = self._tail(place, raw, limit, best)
        depth = place.depth
        if best is not None:
            self._touch(best)
        elif place is not self.root:
            self._touch(place)
        return Match(0 if best is None else best.depth, best, depth)

    @staticmethod
    def _tail(place: Place, raw: bytes, limit: int, best: Place | None) -> Place | None:
        """The deepest tail of a place that these tokens have, if it is deeper than `best`."""
        for key, tail in place.tails.items():
            deeper = best is None or tail.depth > best.depth
            if deeper and tail.depth <= limit and raw.startswith(key, place.depth * WIDE):
                best = tail
        return best

    def lock(self, match: Match) -> list[int]:
        """One more owner for the pages of a match, in order, so that making room cannot take them away.

        Then `adopt` them, or give them back with `pages.free`. Nothing may be inserted in between.
        """
        chain, place = [], match.place
        while place is not None and place is not self.root:
            chain.append(place.page)
            place = place.parent
        return self.pages.share(reversed(chain))

    def adopt(self, match: Match, locked: list[int], slot: int) -> list[int]:
        """Give a running request's `slot` the state of a locked match, its cursor 0; returns the pages of its tokens.

        Whole pages stay shared with the cache, a tail's page is copied, so one page must be free. Raises
        `PoolFullError` with nothing changed.
        """
        place = match.place
        if place is None:
            return []
        assert place.state is not None
        found = locked
        if place.depth % self.pages.page_size:
            own = self.pages.allocate(1)
            self.pages.copy(place.page, own[0])
            self.pages.free([place.page])
            found = locked[:-1] + own
        self.states.copy_to(place.state, self.slots, slot)
        return found

    def count(self, asked: int, match: Match) -> None:
        """Enter an admitted request of `asked` tokens in the statistics."""
        stats = self.stats
        stats.requests += 1
        stats.asked += asked
        stats.pages_hit += max(match.pages_depth, match.depth)  # a tail has a page, too
        stats.hit += match.depth
        stats.requests_hit += match.depth > 0

    def reserve(self, count: int) -> list[int]:
        """Take up to `count` states for a running request's next snapshots, so that none of them has to find room.

        Of all states, at most half is ever reserved. Give them back with `give_back`.
        """
        found: list[int] = []
        for _ in range(min(count, self.states.slots // 2 - self.reserved)):
            if not self.states.can_allocate() and not self._evict_state(self.root):
                break
            found += self.states.allocate(1, owner="a running request")
        self.reserved += len(found)
        return found

    def give_back(self, buffers: list[int]) -> None:
        """What `reserve` gave, where it was not used."""
        self.states.free(buffers)
        self.reserved -= len(buffers)

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        slot: int,
        give: bool = False,
        folded: bool = False,
        buffers: list[int] | None = None,
    ) -> bool:
        """Keep the state of a running request's `slot`, which is the one after all of `tokens`, whose pages are given.

        With `give` the request writes to its last page no more, so that it need not be copied. With `folded` the
        tokens end at the slot's last fold, and its ring is left out. Of `buffers` (`reserve`) one is taken, if there is
        one. False when there was no room, or the state is there already; the pages may have been kept all the same.
        """
        source = _Source(slot, folded, buffers)
        size = self.pages.page_size
        if len(pages) != self.pages.pages_for(len(tokens)) or not tokens:
            raise CacheStateError(
                f"{len(tokens)} tokens take {self.pages.pages_for(len(tokens))} pages of {size}, given are {len(pages)}"
            )
        place, raw, step = self.root, packed(tokens), size * WIDE
        known, whole = 0, len(tokens) // size
        for known in range(whole + 1):
            child = place.children.get(raw[known * step : (known + 1) * step]) if known < whole else None
            if child is None:
                break
            place = child
        for page in self.pages.share(pages[known:whole]):
            key = raw[place.depth * WIDE : place.depth * WIDE + step]
            child = Place(key, page, place, place.depth + size)
            _hang(place, "children", child)
            self._used[child] = None
            place = child
        self._touch(place)
        if rest := raw[place.depth * WIDE :]:
            old = place.tails.get(rest)
            if old is not None:
                self._touch(old)
                return False
            # making room for the tail must not take away what it hangs on, whose page may be the cache's alone
            held = [] if place is self.root else self.pages.share([place.page])
            try:
                return self._insert_tail(place, rest, pages[-1], source, give)
            finally:
                self.pages.free(held)
        if place.state is not None:
            return False
        return self._keep_state(place, source)

    def evict_pages(self, wanted: int) -> int:
        """Give up least recently used places until `wanted` pages became free; returns how many did."""
        freed = 0
        for place in list(self._used):
            if freed >= wanted:
                break
            if place.bare and self.pages.owners(place.page) == 1:
                freed += self._remove(place)
        return freed

    def clear(self) -> None:
        """Give up everything."""
        for place in list(self._used):
            self._drop(place)

    @property
    def cached_pages(self) -> int:
        """Pages that the cache owns, alone or with requests."""
        return len(self._used)

    def check(self) -> None:
        """The books: every place is reachable, its depth that of its key, its page owned, its state's slot its own.

        Raises `CacheStateError`.
        """
        found, todo = [], [self.root]
        while todo:
            place = todo.pop()
            below = [*place.children.values(), *place.tails.values()]
            for one in below:
                if one.depth != place.depth + len(one.key) // WIDE or one.parent is not place:
                    raise CacheStateError(f"a place of depth {one.depth} hangs at one of {place.depth}")
                if self.pages.owners(one.page) < 1:
                    raise CacheStateError(f"page {one.page} of a cached prefix has no owner")
            found += below
            todo += place.children.values()
        states = sorted(place.state for place in found if place.state is not None)
        if len(found) != len(self._used) or set(found) != set(self._used):
            raise CacheStateError(f"{len(found)} places hang in the tree, {len(self._used)} are in its list")
        if len(set(states)) != len(states) or len(states) + self.reserved != self.states.used_slots:
            used = self.states.used_slots
            raise CacheStateError(f"places hold states {states}, requests {self.reserved}; the pool has {used} in use")

    def _insert_tail(self, place: Place, rest: Key, page: int, source: _Source, give: bool) -> bool:
        # a page that is known elsewhere as a whole one would have two places here, and none could give it up
        if give and self.pages.owners(page) == 1:
            (mine,) = self.pages.share([page])
        elif self.pages.can_allocate() or self.evict_pages(1):
            (mine,) = self.pages.allocate(1)
            self.pages.copy(page, mine)
        else:
            return False
        tail = Place(rest, mine, place, place.depth + len(rest) // WIDE)
        _hang(place, "tails", tail)
        self._used[tail] = None
        if self._keep_state(tail, source):
            self._touch(tail)
            return True
        self._remove(tail)
        return False

    def _keep_state(self, place: Place, source: _Source) -> bool:
        if source.buffers:
            state = source.buffers.pop()
            self.reserved -= 1
        elif self.states.can_allocate() or self._evict_state(place):
            (state,) = self.states.allocate(1, owner=place.depth)
        else:
            return False
        (self.slots.copy_folded_to if source.folded else self.slots.copy_to)(source.slot, self.states, state)
        place.state = state
        self._stated[place] = None
        self.stats.snapshots += 1
        return True

    def _evict_state(self, other_than: Place) -> bool:
        """Give up the least recently used state; its pages stay, unless it is a tail, which is nothing without."""
        for place in self._stated:
            if place is not other_than:
                self.stats.states_evicted += 1
                if place.depth % self.pages.page_size:
                    self._remove(place)
                else:
                    self._forget_state(place)
                return True
        return False

    def _forget_state(self, place: Place) -> None:
        if place.state is not None:
            self.states.free([place.state])
            place.state = None
            del self._stated[place]

    def _remove(self, place: Place) -> int:
        """Take a bare place out; returns how many pages became free."""
        before = self.pages.free_pages
        self._drop(place)
        freed = self.pages.free_pages - before
        self.stats.pages_evicted += freed
        return freed

    def _drop(self, place: Place) -> None:
        self._forget_state(place)
        parent = place.parent
        if parent is not None:
            siblings = parent.tails if place.depth % self.pages.page_size else parent.children
            siblings.pop(place.key, None)
        del self._used[place]
        self.pages.free([place.page])

    def _touch(self, place: Place) -> None:
        """Most recently used, and above it whatever it hangs on."""
        node: Place | None = place
        while node is not None and node is not self.root:
            self._used.move_to_end(node)
            if node.state is not None:
                self._stated.move_to_end(node)
            node = node.parent


def _hang(place: Place, where: str, below: Place) -> None:
    found: Below = getattr(place, where)
    if found is _NOTHING:
        found = {}
        setattr(place, where, found)
    found[below.key] = below
