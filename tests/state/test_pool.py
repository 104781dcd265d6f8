"""The pool: exact books, defined states, and rings that never leave their slots."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)  # fmt: skip

from replayssm import ops
from replayssm.errors import DtypeError, OptionError, PoolFullError, ReplayError, RingLengthError, ShapeError, SlotError
from replayssm.reference import serial
from replayssm.spec import LayerSpec
from replayssm.state import SlotPool
from tests import tolerance
from tests.decode_case import layer

LAYERS, SLOTS, WIDTH = 2, 5, 3
DIMS = {"gdn": (1, 2, 8, 6), "kda": (2, 2, 6, 8)}


def pool_of(kind="gdn", slots=SLOTS, ring_len=4, **options):
    spec = layer(kind, DIMS[kind]).spec
    return SlotPool([spec] * LAYERS, slots, ring_len, io_dtype="float32", **options)


class Requests(RuleBasedStateMachine):
    """Requests that come, step in changing company, fork, move to the host and to other slots, and go.

    The oracle keeps the fp64 state of each request by itself; slots that nobody owns hold NaN all the time.
    """

    kind, ring_len, device = "gdn", 4, "cpu"

    def __init__(self):
        super().__init__()
        self.lay = layer(self.kind, DIMS[self.kind], self.ring_len or 1)
        self.parameters = [x.to(self.device) for x in (self.lay.A_log, self.lay.dt_bias)]
        self.pool = pool_of(self.kind, ring_len=self.ring_len, device=self.device)
        self.truth: dict[int, list[torch.Tensor]] = {}  # request -> state of each layer [1, HV, V, K]
        self.slot: dict[int, int] = {}
        self.away: dict[int, object] = {}
        self.born = self.clock = 0

    @initialize()
    def poison(self):
        for x in (self.pool.state, self.pool.conv, self.pool.d, self.pool.k, self.pool.g):
            if x is not None:
                x.fill_(float("nan"))
        self.pool.cursor.fill_(77)

    def begin(self, slot, states):
        self.slot[self.born], self.truth[self.born] = slot, states
        self.born += 1

    @precondition(lambda self: self.pool.can_allocate())
    @rule()
    def arrive(self):
        (slot,) = self.pool.allocate(owner=f"request {self.born}")
        assert slot not in self.slot.values()
        assert not self.pool.state[:, slot].any()
        assert not self.pool.conv[:, slot].any()
        self.begin(slot, [torch.zeros(self.lay.spec.state_array(1).shape, dtype=torch.float64) for _ in range(LAYERS)])

    @precondition(lambda self: self.slot)
    @rule(data=st.data(), pad=st.integers(0, 2))
    def step(self, data, pad):
        """One token for some requests, with padding rows; the ring is folded where it is full or by force."""
        who = data.draw(st.lists(st.sampled_from(sorted(self.slot)), min_size=1, unique=True))
        rows = [self.slot[r] for r in who] + [-1] * pad
        force = torch.tensor([int(data.draw(st.booleans())) for _ in rows]).int().to(self.device)
        slots = self.pool.index(rows)
        pos = ops.gather_cursors(self.pool.cursor, slots)
        for i in range(LAYERS):
            token = self.lay.tokens(1, len(rows), seed=100 * self.clock + i)[0]
            mine, out = self.pool.layer(i), self.lay.empty_out(len(rows)).to(self.device)
            args = (*(x.to(self.device) for x in token), *self.parameters, None, mine.state)
            if mine.d is None:
                ops.fused_recurrent_linear_packed_decode(*args, out, slots, **self.lay.gate_args)
            else:
                rings = mine.d, mine.k, mine.g
                ops.fused_recurrent_linear_replayssm_decode(*args, *rings, out, slots, pos, force, **self.lay.gate_args)
            for row, request in enumerate(who):
                now = (x[row : row + 1, None] for x in token)
                want, self.truth[request][i] = serial(
                    *now, self.lay.A_log, self.lay.dt_bias, None, self.truth[request][i], **self.lay.gate_args
                )
                tolerance.assert_close(out[row].cpu(), want[0], 1e-4, "output")
            x = torch.full((len(rows), self.lay.spec.qkv_dim), float(self.clock + i), device=self.device)
            ops.causal_conv_update(x, mine.conv, torch.ones(x.shape[1], WIDTH + 1, device=self.device), None, slots)
        if self.ring_len is not None:
            ops.advance_cursors(self.pool.cursor, slots, self.ring_len, force)
        self.clock += 1

    @precondition(lambda self: self.slot and self.pool.free_slots)
    @rule(data=st.data())
    def fork(self, data):
        request = data.draw(st.sampled_from(sorted(self.slot)))
        count = data.draw(st.integers(1, self.pool.free_slots))
        before = self.pool.cursor[self.slot[request]].item()
        for slot in self.pool.fork(self.slot[request], count, owner="fork"):
            assert torch.equal(self.pool.conv[:, slot], self.pool.conv[:, self.slot[request]])
            self.begin(slot, [x.clone() for x in self.truth[request]])
        assert self.pool.cursor[self.slot[request]].item() == before

    @precondition(lambda self: len(self.slot) > 1)
    @rule(data=st.data())
    def overwrite(self, data):
        """A request takes the state of another, as when it falls back to an earlier one; its own ring is forgotten."""
        src, dst = data.draw(st.lists(st.sampled_from(sorted(self.slot)), min_size=2, max_size=2, unique=True))
        self.pool.copy(self.slot[src], self.slot[dst])
        self.truth[dst] = [x.clone() for x in self.truth[src]]

    @precondition(lambda self: self.slot)
    @rule(data=st.data())
    def flush(self, data):
        who = data.draw(st.lists(st.sampled_from(sorted(self.slot)), unique=True))
        self.pool.flush(self.slot[r] for r in who)

    @precondition(lambda self: self.slot)
    @rule(data=st.data())
    def leave_for_the_host(self, data):
        request = data.draw(st.sampled_from(sorted(self.slot)))
        slot = self.slot.pop(request)
        self.away[request] = self.pool.offload(slot)
        self.give_back(slot)

    @precondition(lambda self: self.away and self.pool.can_allocate())
    @rule(data=st.data())
    def come_back(self, data):
        request = data.draw(st.sampled_from(sorted(self.away)))
        (slot,) = self.pool.allocate()
        if self.ring_len is not None:
            self.pool.cursor[slot] = 1  # as if somebody had stepped there meanwhile
        self.pool.restore(slot, self.away.pop(request))
        self.slot[request] = slot

    @precondition(lambda self: self.slot)
    @rule(data=st.data())
    def end(self, data):
        request = data.draw(st.sampled_from(sorted(self.slot)))
        del self.truth[request]
        self.give_back(self.slot.pop(request))

    def give_back(self, slot):
        self.pool.free([slot])
        for x in (self.pool.state, self.pool.conv, self.pool.d, self.pool.k, self.pool.g):
            if x is not None:
                x[:, slot] = float("nan")

    @invariant()
    def books_balance(self):
        self.pool.check()
        assert self.pool.used_slots == len(self.slot)
        assert self.pool.free_slots == SLOTS - len(self.slot)

    def teardown(self):
        self.pool.flush(self.slot.values())
        for request, slot in self.slot.items():
            for i in range(LAYERS):
                tolerance.assert_close(self.pool.state[i, slot : slot + 1].cpu(), self.truth[request][i], 1e-4, "state")
        self.pool.free(list(self.slot.values()))
        assert self.pool.free_slots == SLOTS


class KdaRequests(Requests):
    kind, ring_len = "kda", 3


class PackedRequests(Requests):
    ring_len = None


class GdnOnGpu(Requests):
    device = "cuda"


class KdaOnGpu(KdaRequests):
    device = "cuda"


CALM = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestGdn, TestKda, TestPacked = Requests.TestCase, KdaRequests.TestCase, PackedRequests.TestCase
TestGdn.settings = TestKda.settings = TestPacked.settings = CALM


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("requests", [GdnOnGpu, KdaOnGpu])
def test_the_pool_on_a_gpu_keeps_every_state(requests):
    run_state_machine_as_test(requests, settings=CALM)


def test_ten_thousand_requests_leave_every_slot_free():
    """Ends, aborts before and after a step, forks that outlive their source: nothing is lost or given twice."""
    pool, gen, live = pool_of(slots=16), torch.Generator().manual_seed(4), []
    for n in range(10_000):
        wanted = int(torch.randint(1, 4, (1,), generator=gen))
        if pool.can_allocate(wanted):
            live += pool.allocate(wanted, owner=n)
        while live and (len(live) > 12 or int(torch.randint(0, 2, (1,), generator=gen))):
            pool.free([live.pop(int(torch.randint(0, len(live), (1,), generator=gen)))])
        assert len(set(live)) == len(live) == pool.used_slots
    pool.free(live)
    pool.check()
    assert (pool.free_slots, pool.used_slots) == (16, 0)


def test_slots_are_plain_numbers_that_nothing_changes():
    pool = pool_of()
    a, b = pool.allocate(2)
    pool.free([b])
    pool.allocate(1)
    assert type(a) is int
    assert a == 0


def test_mistakes_are_refused_and_change_nothing():
    pool = pool_of()
    one, two = pool.allocate(2, owner="request 7")
    before = pool.state.clone()
    for slots, said in (
        ([one, one], f"slot {one} of request 7 is named twice"),
        ([one, 4], "slot 4 is free"),
        ([two, -1], "slot -1 is outside 0…4"),
        ([5], "slot 5 is outside"),
    ):
        for call in (pool.free, pool.flush):
            with pytest.raises(SlotError, match=said):
                call(slots)
    with pytest.raises(SlotError, match="slot 3 is free"):
        pool.copy(one, 3)
    with pytest.raises(SlotError, match="slot 3 is free"):
        pool.fork(3)
    with pytest.raises(SlotError, match="slot 3 is free"):
        pool.offload(3)
    with pytest.raises(SlotError, match="slot 4 is free"):
        pool.index([one, -1, 4])
    with pytest.raises(PoolFullError, match="4 slots asked for, 3 of 5 are free"):
        pool.allocate(4)
    with pytest.raises(PoolFullError, match="4 slots asked for"):
        pool.fork(one, 4)
    with pytest.raises(OptionError, match="-1 slots"):
        pool.allocate(-1)
    pool.check()
    assert (pool.used_slots, pool.free_slots) == (2, 3)
    assert torch.equal(pool.state, before)
    pool.free([one])
    with pytest.raises(SlotError, match="given back"):
        pool.free([one])


def test_a_saved_state_of_another_kind_is_refused():
    pool, other, kda = pool_of(), pool_of(state_dtype="bfloat16"), pool_of("kda")
    (slot,), (theirs,), (other_kind,) = pool.allocate(), other.allocate(), kda.allocate()
    with pytest.raises(ShapeError, match="bfloat16"):
        pool.restore(slot, other.offload(theirs))
    with pytest.raises(ShapeError, match="saved state"):
        pool.restore(slot, kda.offload(other_kind))


def test_what_is_saved_is_a_copy():
    pool = pool_of()
    (slot,) = pool.allocate()
    saved = pool.offload(slot)
    pool.state[:, slot] = 5.0
    assert not saved.state.any()
    assert saved.nbytes == pool.state[:, slot].nbytes + pool.conv[:, slot].nbytes


def test_transfer_carries_no_ring():
    pool = pool_of()
    buffers = pool.transfer_buffers()
    assert buffers == {"state": pool.state, "conv": pool.conv}


@pytest.mark.parametrize("ring_len", [None, 1, 8])
@pytest.mark.parametrize("kind", DIMS)
def test_bytes_of_a_slot_are_those_of_the_pool(kind, ring_len):
    spec = layer(kind, DIMS[kind]).spec
    options = dict(ring_len=ring_len, state_dtype="float16", io_dtype="bfloat16")
    assert SlotPool([spec] * 3, 7, **options).nbytes == 7 * SlotPool.slot_bytes([spec] * 3, **options)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (dict(specs=[]), ShapeError, "at least one"),
        (dict(specs=[LayerSpec("gdn", 1, 2, 8, 8), LayerSpec("gdn", 1, 2, 8, 4)]), ShapeError, "linear layer 1"),
        (dict(slots=0), ShapeError, "0 slots"),
        (dict(ring_len=0), RingLengthError, "0"),
        (dict(ring_len=65), RingLengthError, "65"),
        (dict(state_dtype="float64"), DtypeError, "float64"),
    ],
)
def test_pools_that_cannot_be(change, error, said):
    with pytest.raises(error, match=said) as raised:
        SlotPool(**dict(specs=[LayerSpec("gdn", 1, 2, 8, 8)], slots=2) | change)
    assert isinstance(raised.value, ReplayError)
