"""The kernels' indices, masks, formulas and barriers, run by `emulator` on the CPU: every kind and launch shape."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from replayssm import reference
from tests import tolerance
from tests.decode_case import KINDS, Pool, Tokens, int32, layer
from tests.kernels.gluon import case, tasks
from tests.kernels.gluon.emulator import emulated

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def backend():
    with emulated() as module:
        yield module


@pytest.fixture(autouse=True)
def order(request):
    """Who runs when is drawn, and the same for every run of a test."""
    tasks.ORDER.seed(request.node.name)


LAUNCHES = {
    "registers": dict(rows=32, chunk=32, warps=1),
    "registers, chunks": dict(rows=32, chunk=16, warps=1),
}
# Packed decode only.
PACKED = {
    "staged": dict(rows=32, chunk=16, warps=1, staged=True),
    "whole": dict(rows=16, chunk=16, warps=1, whole=True),
    "whole, chunks": dict(rows=32, chunk=16, warps=1, whole=True),
    "whole, staged": dict(rows=32, chunk=16, warps=1, whole=True, staged=True),
}
# On the emulator's two multiprocessors: 2, 4 or 6 programs of several tiles.
STREAMS = {
    "2 stages": dict(rows=16, chunk=16, warps=4, stages=2, per_sm=1),
    "3 stages": dict(rows=16, chunk=16, warps=4, stages=3, per_sm=2),
    "1 worker": dict(rows=16, chunk=16, warps=4, stages=2, per_sm=3, workers=1),
    "1 stage": dict(rows=16, chunk=16, warps=4, stages=1, per_sm=1, workers=1),
    "chunks": dict(rows=32, chunk=16, warps=4, stages=2, per_sm=1),
    "3 stages, 1 worker, chunks": dict(rows=32, chunk=16, warps=4, stages=3, per_sm=1, workers=1),
}


def launch_of(backend, shape):
    return backend.Launch(**LAUNCHES[shape]) if shape in LAUNCHES else backend.Stream(**STREAMS[shape])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("shape", [*LAUNCHES, *STREAMS])
def test_every_launch_shape_equals_the_oracle(backend, shape, kind):
    case.replay(backend, layer(kind, (1, 2, 32, 32), 3), 8, params=launch_of(backend, shape))


@pytest.mark.parametrize(
    ("kind", "dims", "ring_len", "options"),
    [
        ("gdn-beta2", (3, 3, 64, 32), 5, {}),
        ("gdn", (1, 1, 32, 32), 20, {}),
        ("gdn", (1, 2, 32, 64), 1, {"l2norm": False}),
        ("gdn", (1, 3, 32, 32), 2, {"io": BF16, "state_dtype": BF16}),
        ("kda-bounded", (2, 4, 32, 64), 4, {"l2norm": False}),
        ("kda", (1, 1, 64, 32), 18, {}),
        ("gdn", (2, 4, 48, 96), 5, {}),
        ("gdn-beta2", (1, 2, 96, 48), 2, {"io": BF16, "state_dtype": BF16}),
        ("kda", (1, 2, 80, 32), 4, {"l2norm": False}),
        ("kda-bounded", (2, 2, 48, 80), 9, {"io": FP16, "state_dtype": FP16}),
        ("kda", (1, 1, 32, 32), 4, {"io": BF16, "state_dtype": FP16}),
    ],
)
def test_table_launch_on_other_geometries_with_strided_inputs(backend, kind, dims, ring_len, options):
    case.replay(backend, layer(kind, dims, ring_len, **options), ring_len + 3, strided=True)


@pytest.mark.parametrize(
    ("shape", "kind", "dims", "ring_len", "steps", "options"),
    [
        ("2 stages", "gdn", (1, 2, 32, 32), 1, 3, {"l2norm": False}),
        ("3 stages", "kda", (1, 1, 32, 64), 1, 3, {}),
        ("1 worker", "gdn-beta2", (2, 2, 64, 32), 2, 7, {"io": BF16, "state_dtype": BF16}),
        ("chunks", "kda-bounded", (2, 4, 64, 32), 2, 6, {}),
        ("3 stages", "gdn", (1, 3, 32, 64), 5, 8, {"io": BF16}),
        ("chunks", "kda", (1, 3, 32, 32), 5, 12, {"state_dtype": FP16}),
        ("2 stages", "gdn", (1, 2, 64, 32), 8, 19, {}),
        ("1 worker", "kda-bounded", (1, 2, 32, 32), 8, 19, {"io": FP16, "l2norm": False}),
        ("3 stages, 1 worker, chunks", "gdn", (1, 1, 32, 64), 13, 30, {}),
        ("2 stages", "kda", (1, 1, 32, 32), 13, 28, {"state_dtype": BF16}),
        ("3 stages", "kda-bounded", (1, 1, 32, 64), 19, 22, {}),
        ("1 stage", "gdn", (1, 1, 64, 32), 19, 41, {"io": BF16}),
    ],
)
def test_streams_of_every_geometry(backend, shape, kind, dims, ring_len, steps, options):
    lay = layer(kind, dims, ring_len, **options)
    case.replay(backend, lay, steps, strided=ring_len != 8, params=launch_of(backend, shape))


# Slot 0 in use; padding nowhere, everywhere, or in whole programs; more programs than tiles.
@pytest.mark.parametrize("slots", [(0, 2), (2, 0, -1, -1), (-1, -1, -1, 0), (-1, 0)], ids=str)
@pytest.mark.parametrize("shape", ["registers", "3 stages", "chunks"])
def test_padding(backend, shape, slots):
    lay = layer("kda", (1, 1, 32, 32), 2)
    case.replay(backend, lay, 5, slots=int32(*slots), params=launch_of(backend, shape))


@pytest.mark.parametrize("shape", ["registers", "3 stages"])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_live_rows_touches_nothing(backend, shape, rows):
    lay = layer("gdn", (1, 2, 32, 32), 4)
    pools = case.placed(lay, int32(1), lay.state(1), "cpu", False)
    before = [x.clone() for x in pools]
    out, slots, pos = lay.empty_out(rows), -1 - torch.arange(rows).int(), case.GARBAGE[:rows]
    token, args = [x[0] for x in lay.tokens(1, rows)[:]], case.constants(lay, "cpu")
    backend.replay_decode(
        *token, *args, *pools, out, slots, pos, pos, *case.gate(lay), params=launch_of(backend, shape)
    )
    assert not out.any()
    assert case.same(before, pools)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize(("shape", "k_dim"), [("registers", 32), ("registers", 48), ("2 stages", 32), ("1 worker", 32)])
def test_nothing_leaks_from_what_a_row_does_not_own(backend, shape, k_dim, kind):
    lay, slots = layer(kind, (1, 2, k_dim, 32), 5), int32(3, 0, -1, 1, 5, -1)
    cursor, force = int32(4, 0, -9, 2, 3, 7), int32(0, 1, 1, 0, -1, 0)  # folds by length and by force, appends
    case.assert_nothing_leaks(backend, lay, slots, cursor, force, params=launch_of(backend, shape))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize(("shape", "k_dim"), [("staged", 32), ("whole", 48), ("whole, staged", 48)])
def test_nothing_leaks_into_packed_decode(backend, shape, k_dim, kind):
    lay, slots = layer(kind, (1, 2, k_dim, 32), 5), int32(3, 0, -1, 1, 5, -1)
    still = torch.zeros(6).int()
    params = backend.Launch(**PACKED[shape])
    case.assert_nothing_leaks(backend, lay, slots, still, still, op="packed", params=params)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_padded_columns_of_the_last_slot_are_not_read(backend, kind):
    """Behind them is no memory of ours. By chunks, and by a flush with part of a ring."""
    lay, slots = layer(kind, (1, 2, 48, 32), 4), int32(1, 0)
    pools, tokens = Pool(lay, 2), lay.tokens(6, 2)
    state = lay.state(2)
    pools.place(slots, state)
    cursor, outs, params = torch.zeros(2).int(), [], launch_of(backend, "registers, chunks")
    for t in range(6):
        out = lay.empty_out(2)
        args = (*tokens[t], *case.constants(lay, "cpu"), *pools.tensors, out, slots, cursor, None)
        backend.replay_decode(*args, *case.gate(lay), params=params)
        cursor = (cursor + 1) % 4
        outs.append(out[:, 0])
    backend.flush(*pools.tensors, slots, cursor, lay.l2norm)
    want, final = lay.serial(state, tokens)
    tolerance.assert_close(torch.stack(outs), want, tolerance.output(48, 4, FP32), "output")
    tolerance.assert_close(pools.initial_state[slots.long()], final, tolerance.state(48, 4, FP32, 1), "state")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["registers", "registers, chunks", "2 stages", "1 worker"])
def test_extreme_gates(backend, shape, kind):
    """Inputs that saturate softplus and sigmoid, decays of 0 and of e^-30, and rates past the fp32 range."""
    lay, steps = layer(kind, (1, 2, 32, 32), 3), 6
    lay.A_log = torch.tensor([-20.0, 3.0])
    tokens, gen = lay.tokens(steps, len(case.SLOTS), 4), torch.Generator().manual_seed(1)
    extremes = torch.tensor([-INF, -100.0, -20.0, 0.0, 1.0, 20.1, 89.0, 1e4, INF])
    for x in (tokens.a, tokens.b):
        x.copy_(extremes[torch.randint(len(extremes), x.shape, generator=gen)])
    tokens.a[0] = tokens.b[0] = 0.0
    known = case.past(lay, tokens, case.owners(case.SLOTS))
    case.replay(backend, lay, steps, known=known, params=launch_of(backend, shape))


@pytest.mark.parametrize("shape", ["registers", "2 stages"])
def test_a_rate_past_the_fp32_range_still_multiplies_zero(backend, shape):
    """exp(A_log) would be inf, and the softplus of -inf is 0."""
    lay = layer("gdn", (1, 2, 32, 32), 3)
    lay.A_log = torch.tensor([200.0, INF])
    slots, steps = int32(1, 0), 4
    tokens = lay.tokens(steps, 2)
    tokens.a.fill_(-INF)
    calm = layer("gdn", (1, 2, 32, 32), 3)
    known = case.past(calm, Tokens(tokens.mixed_qkv, tokens.a, tokens.b), [0, 1])  # a gate of 0 at any rate
    case.replay(backend, lay, steps, slots=slots, known=known, params=launch_of(backend, shape))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("shape", ["registers", "2 stages"])
def test_the_ring_holds_a_finite_number_for_a_decay_to_zero(backend, shape, kind):
    """All backends read each other's rings, and -inf in one would be their problem."""
    lay = layer(kind, (1, 2, 32, 32), 3)
    moment = case.moment(lay, int32(1, 0), int32(1, 0), None)
    moment.inputs[1].fill_(INF)
    g = moment.step(backend, params=launch_of(backend, shape))[4]
    assert bool((g[1, :, 1] == -200.0).all())
    assert bool((g[0, :, 0] == -200.0).all())


@pytest.mark.parametrize("shape", ["registers", "2 stages"])
def test_without_flags_only_full_rings_fold(backend, shape):
    lay, slots = layer("gdn", (1, 2, 32, 32), 4), int32(1, 0, -1)
    for cursor in (int32(3, 1, 9), int32(2, 3, -5), int32(1, 1, 3)):
        one, other = (
            case.moment(lay, slots, cursor, force).step(backend, params=launch_of(backend, shape))
            for force in (None, int32(0, 0, 1))
        )
        assert case.same(one, other)


@pytest.mark.parametrize("dims", [(2, 6, 32, 64), (1, 2, 48, 96)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [LAUNCHES["registers, chunks"], *PACKED.values()], ids=["registers", *PACKED])
def test_packed_equals_the_oracle(backend, kind, shape, dims):
    case.packed(backend, layer(kind, dims), 3, strided=True, params=backend.Launch(**shape))


@pytest.mark.parametrize("op", ["packed", "registers", "2 stages"])
def test_state_past_the_fp16_range_saturates(backend, op):
    lay = layer("gdn", (1, 1, 32, 32), 1, state_dtype=FP16, l2norm=False)
    slots = int32(0)
    pools = case.placed(lay, slots, torch.full((1, 1, 32, 32), 6e4), "cpu", False)
    mixed, a, b = (x[0] for x in lay.tokens(1, 1)[:])
    args = (mixed * 1e6, torch.full_like(a, -50.0), b, *case.constants(lay, "cpu"))
    out = lay.empty_out(1)
    if op == "packed":
        backend.packed_decode(*args, pools[0], out, slots, *case.gate(lay))
    else:
        backend.replay_decode(*args, *pools, out, slots, int32(0), None, *case.gate(lay), params=launch_of(backend, op))
    assert bool(torch.isfinite(pools[0][0]).all())
    assert float(pools[0][0].float().abs().max()) == 65504.0


def test_keys_whose_norm_overflows_keep_their_weight_without_normalization(backend):
    from replayssm.kernels.gluon import blocks

    k = torch.full((2, 4), 1e20)
    inverse, *dots = blocks.ring_dots(k, k, torch.full((4,), 1e-20), torch.full((4,), 2e-20), False)
    assert inverse.tolist() == [1, 1]
    assert [dot.tolist() for dot in dots] == [pytest.approx([4, 4]), pytest.approx([8, 8])]


def test_flush_of_several_layers(backend):
    lay = layer("kda", (1, 2, 32, 32), 4)
    pools = [lay.spec.state_array(3).shape, *(r.shape for r in lay.spec.ring_arrays(4, 3, "float32"))]
    gen = torch.Generator().manual_seed(2)
    state, d, k, g = (torch.randn(2, *shape, generator=gen) for shape in pools)
    g = -g.abs()
    slots, pos = int32(2, -1, 0), int32(4, 4, 0)
    want = [reference.flush(*one, slots, pos) for one in zip(state, d, k, g, strict=True)]
    backend.flush(state, d, k, g, slots, pos, True)
    torch.testing.assert_close(state, torch.stack(want), rtol=1e-5, atol=1e-5)


def test_a_wrong_kernel_is_noticed(backend, monkeypatch):
    from replayssm.kernels.gluon import blocks

    monkeypatch.setattr(blocks, "LOG_DECAY_FLOOR", -0.1)
    with pytest.raises(AssertionError, match="relative error"):
        case.replay(backend, layer("gdn", (1, 2, 32, 32), 3), 5)


def test_more_workers_than_stages_are_refused(backend):
    """One of them could be two phases ahead of the other, where parity says the same again."""
    with pytest.raises(AssertionError):
        backend.Stream(rows=16, chunk=16, warps=4, stages=1, per_sm=1, workers=2)


def test_gates_whose_heads_are_far_apart_are_copied(backend):
    """The kernels form offsets within a row in 32 bits."""
    far, close = (torch.empty_strided((2, 3, 4), (1, step, 2), device="meta") for step in (2**30, 2**29))
    assert backend.near(far).is_contiguous()
    assert backend.near(close) is close
    last = torch.empty_strided((2, 1, 3), (1, 2**40, 2**30), device="meta")
    assert backend.near(last).is_contiguous()


def test_the_table_fits_every_geometry(backend):
    table = backend.launch
    dims = (32, 48, 64, 80, 96, 128, 192, 240, 256)
    sizes = itertools.product((False, True), (2, 4), (1, 20, 100, 5000), dims, dims)
    for is_kda, size, heads, k_dim, v_dim in sizes:
        for p in (
            *(table.replay(is_kda, size, heads, v_dim, k_dim, length) for length in (1, 8, 17, 64)),
            table.packed(is_kda, size, heads, v_dim, k_dim),
            table.fold(size, v_dim, k_dim, 16),
        ):
            assert v_dim % p.rows == 0 == p.rows % p.chunk
            lanes_k = 32 if isinstance(p, backend.Launch) and p.whole else 8
            k_pad = table.padded(k_dim)
            assert p.chunk % (32 // min(lanes_k, k_pad * size // 16) * p.warps) == 0
            if isinstance(p, backend.Launch):
                assert not p.staged or p.rows * k_pad * size <= 96 * 1024


@pytest.mark.parametrize("name", ["REPLAY", "REPLAY_LONG", "PACKED"])
def test_every_case_of_the_table_ends_without_a_limit(backend, name):
    for entries in getattr(backend.launch, name).values():
        limits = [limit for limit, _ in entries]
        assert limits[-1] is None
        assert limits[:-1] == sorted(limits[:-1])


def test_supports_names_the_reason(backend):
    for dims, text in (((1, 2, 40, 32), "K = 40"), ((1, 2, 32, 24), "V = 24"), ((1, 1, 16, 32), "K = 16")):
        assert text in backend.supports(layer("gdn", dims).state(1))
    lay = layer("gdn", (1, 2, 32, 32))
    assert "cpu" in backend.supports(lay.state(1))


@pytest.mark.parametrize(
    ("slots", "stride", "address", "capability", "said"),
    [
        (4, 6144, 256, (9, 0), None),
        (4, 6160, 256, (10, 3), None),  # no multiple of K, which only a stream needs
        (4, 6152, 256, (9, 0), "slot stride 6152"),
        (4, 6144, 264, (9, 0), "not aligned"),
        (0, 6144, 256, (9, 0), "no slots"),
        (4, 6144, 256, (8, 0), "capability 8.0"),
    ],
)
def test_supports_looks_at_memory_and_device(backend, monkeypatch, slots, stride, address, capability, said):
    state = SimpleNamespace(
        shape=(slots, 2, 32, 96), is_cuda=True, device=torch.device("cuda"), stride=lambda axis: stride,
        data_ptr=lambda: address,
    )  # fmt: skip
    monkeypatch.setattr(backend.torch.version, "hip", None)
    monkeypatch.setattr(backend.torch.cuda, "get_device_capability", lambda device: capability)
    why = backend.supports(state)
    assert why is None if said is None else said in why


def test_a_stream_needs_slots_that_are_rows_of_k_apart(backend):
    table, case_of = backend.launch, (False, 4, 8192, 128, 128, 8)
    assert isinstance(table.replay(*case_of), backend.Stream)
    assert isinstance(table.replay(*case_of, False), backend.Launch)
