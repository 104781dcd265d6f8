"""Pages: exact books with several owners of a page, and content that moves where it is told and nowhere else."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replayssm.errors import OptionError, PoolFullError, ShapeError, SlotError
from replayssm.state import PagePool, TokenArray

PAGES, SIZE = 6, 3
KEYS, INDEX = TokenArray(2, 5, torch.float32), TokenArray(1, 4, torch.float16)
LAYERS = [[KEYS, KEYS], [TokenArray(1, 3, torch.bfloat16), INDEX], [KEYS, KEYS, INDEX]]


def pool_of(pages=PAGES, **options):
    return PagePool(LAYERS, pages, SIZE, **options)


def content(pool, page):
    """Everything that a page holds, as numbers."""
    rows = slice(page * SIZE, (page + 1) * SIZE)
    return torch.cat([x[rows].float().flatten() for layer in pool.arrays for x in layer])


def fill(pool, page, value):
    """Different numbers in every place of a page, that no other fill has there."""
    for i, x in enumerate(x for layer in pool.arrays for x in layer):
        part = x[page * SIZE : (page + 1) * SIZE]
        part.copy_(value + i + torch.arange(part.numel()).view_as(part) / part.numel())


class Owners(RuleBasedStateMachine):
    """Requests that own lists of pages, as plain Python says. Pages that nobody owns hold NaN."""

    clear = False

    def __init__(self):
        super().__init__()
        self.pool = pool_of(clear=self.clear)
        self.owned: list[list[int]] = []  # of each request; forks have pages in common
        self.holds: dict[int, torch.Tensor] = {}
        self.away: list[tuple[object, list[torch.Tensor]]] = []
        self.clock = 0
        self.poison(range(PAGES))

    def poison(self, pages):
        for page in pages:
            for layer in self.pool.arrays:
                for x in layer:
                    x[page * SIZE : (page + 1) * SIZE] = float("nan")

    def count(self, page):
        return sum(pages.count(page) for pages in self.owned)

    def write(self, page):
        fill(self.pool, page, 8 * self.clock)
        self.holds[page] = content(self.pool, page)
        self.clock = (self.clock + 1) % 100

    def some(self, data):
        return data.draw(st.sampled_from(self.owned))

    @rule(count=st.integers(0, PAGES + 1))
    def arrive(self, count):
        free = self.pool.free_pages
        assert self.pool.can_allocate(count) == (count <= free)
        if count > free:
            with pytest.raises(PoolFullError, match=f"{count} pages asked for, {free} of {PAGES} are free"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == len(pages) == count
        assert all(type(page) is int and 0 <= page < PAGES and not self.count(page) for page in pages)
        if self.clear:
            assert not any(bool(content(self.pool, page).any()) for page in pages)
        if pages:
            self.owned.append(pages)
            for page in pages:
                self.write(page)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def fork(self, data):
        pages = self.some(data)
        some = data.draw(st.lists(st.sampled_from(pages), unique=True, min_size=1))
        assert self.pool.share(some) == some
        self.owned.append(some)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def end(self, data):
        self.give_back(self.some(data))

    @precondition(lambda self: len(self.holds) > 1)
    @rule(data=st.data())
    def copy(self, data):
        src, dst = data.draw(st.lists(st.sampled_from(sorted(self.holds)), min_size=2, max_size=2, unique=True))
        self.pool.copy(src, dst)
        self.holds[dst] = self.holds[src]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def leave_for_the_host(self, data):
        pages = self.some(data)
        self.away.append((self.pool.offload(pages), [self.holds[page] for page in pages]))
        self.give_back(pages)

    def give_back(self, pages):
        self.owned.remove(pages)
        self.pool.free(pages)
        gone = [page for page in pages if not self.count(page)]
        for page in gone:
            del self.holds[page]
        self.poison(gone)

    @precondition(lambda self: self.away and self.pool.can_allocate(len(self.away[-1][1])))
    @rule()
    def come_back(self):
        saved, want = self.away.pop()
        pages = self.pool.allocate(len(want))
        self.pool.restore(pages, saved)
        self.owned.append(pages)
        self.holds.update(zip(pages, want, strict=True))

    @rule(data=st.data(), page=st.integers(-1, PAGES + 2))
    def mistakes_change_nothing(self, data, page):
        """A page that nobody owns, alone and behind one that is owned; and one named twice."""
        calls = [self.pool.free, self.pool.share, self.pool.offload, lambda pages: self.pool.restore(pages, [])]
        good = data.draw(st.sampled_from(sorted(self.holds))) if self.holds else None
        wrong = [[good, good]] if good is not None else []
        if page not in self.holds:
            wrong += [[page]] + ([[good, page]] if good is not None else [])
        for pages in wrong:
            for call in calls:
                with pytest.raises(SlotError, match=rf"page {page} |name one twice"):
                    call(pages)
            if len(pages) == 2:
                for src, dst in (pages, pages[::-1]):
                    with pytest.raises(SlotError):
                        self.pool.copy(src, dst)

    @invariant()
    def books_and_contents(self):
        self.pool.check()
        used = {page for pages in self.owned for page in pages}
        assert used == set(self.holds)
        assert (self.pool.used_pages, self.pool.free_pages) == (len(used), PAGES - len(used))
        for page, want in self.holds.items():
            assert torch.equal(content(self.pool, page), want), page
        for page in (self.pool.trash, self.pool.zeros):
            assert not content(self.pool, page).any()

    def teardown(self):
        for pages in self.owned:
            self.pool.free(pages)
        assert self.pool.free_pages == PAGES
        self.pool.check()


class ClearedOwners(Owners):
    clear = True


TestPages, TestCleared = Owners.TestCase, ClearedOwners.TestCase
TestPages.settings = TestCleared.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True
)


def test_a_page_lives_until_its_last_owner_lets_go():
    pool = pool_of()
    (page,) = pool.allocate()
    pool.share([page])
    pool.share([page])
    for _ in range(2):
        pool.free([page])
        assert pool.used_pages == 1
    pool.free([page])
    assert (pool.used_pages, pool.free_pages) == (0, PAGES)
    for call in (pool.free, pool.share, pool.offload):
        with pytest.raises(SlotError, match=f"page {page} is free"):
            call([page])


def test_the_two_pages_at_the_end_belong_to_nobody():
    pool = pool_of()
    assert (pool.trash, pool.zeros) == (PAGES, PAGES + 1)
    assert sorted(pool.allocate(PAGES)) == list(range(PAGES))
    for page in (pool.trash, pool.zeros, -1):
        with pytest.raises(SlotError, match=f"page {page} is outside 0…{PAGES - 1}"):
            pool.free([page])


def test_bytes_are_those_that_were_announced():
    for pages in (1, 5):
        pool = pool_of(pages)
        assert pool.nbytes == (pages + 2) * PagePool.page_bytes(LAYERS, SIZE)
        assert pool.nbytes == sum(x.nbytes for layer in pool.arrays for x in layer)
    assert PagePool([], 2, SIZE).nbytes == PagePool.page_bytes([], SIZE) == 0


def test_arrays_have_the_shapes_of_their_layers_and_share_no_memory():
    pool = pool_of()
    for layer, kinds in zip(pool.arrays, LAYERS, strict=True):
        for x, kind in zip(layer, kinds, strict=True):
            assert x.shape == ((PAGES + 2) * SIZE, kind.heads, kind.dim)
            assert x.dtype == kind.dtype
    for number, x in enumerate(flat := [x for layer in pool.arrays for x in layer]):
        x.fill_(number + 1)
    assert [float(x.min()) for x in flat] == [float(x.max()) for x in flat] == [*range(1, len(flat) + 1)]


def test_what_is_saved_is_a_copy_and_fits_only_as_many_pages():
    pool = pool_of()
    pages = pool.allocate(2)
    for page in pages:
        fill(pool, page, 7)
    want = [content(pool, page) for page in pages]
    saved = pool.offload(pages)
    for page in pages:
        fill(pool, page, 90)
    pool.restore(pages[::-1], saved)
    assert torch.equal(content(pool, pages[1]), want[0])
    assert torch.equal(content(pool, pages[0]), want[1])
    with pytest.raises(ShapeError, match=r"saved pages has shape \[6, 2, 5\], expected \[3, 2, 5\]"):
        pool.restore(pages[:1], saved)


def test_sizes():
    pool = pool_of()
    assert [pool.pages_for(tokens) for tokens in (0, 1, 3, 4, 6, 7)] == [0, 1, 1, 2, 2, 3]
    for pages, size in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ShapeError, match="hold nothing"):
            PagePool(LAYERS, pages, size)


def test_fewer_pages_than_none_are_refused():
    pool = pool_of()
    with pytest.raises(OptionError, match="-1 pages"):
        pool.allocate(-1)
    assert pool.free_pages == PAGES
