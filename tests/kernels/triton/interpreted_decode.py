"""Replay and packed decode in the Triton interpreter, against the fp64 reference."""

from __future__ import annotations

import math

import pytest
import torch

import tests.kernels.triton.interpreter  # noqa: F401 # isort: skip - before anything that imports Triton

from replayssm import reference
from replayssm.kernels.torch_math import LOG_DECAY_FLOOR
from tests import tolerance
from tests.decode_case import KINDS, NAN, Pool, int32, layer
from tests.step_case import decode, filled_pool, rows_of, same, step

INF = math.inf
KIND = pytest.mark.parametrize("kind", ["gdn", "kda"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = (1, 3, 12, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_len", [1, 2, 8, 16])
def test_every_cursor_with_and_without_forced_flush(kind, ring_len):
    cursors = range(ring_len) if ring_len < 16 else (0, 1, 7, 8, 14, 15)
    pairs = [(n, f) for n in cursors for f in (0, 5)]  # any value but 0 counts
    if kind in ("gdn-beta2", "kda-bounded"):
        pairs = pairs[:: 1 if ring_len < 8 else 3]
    slots = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1)).int() + 1
    step(layer(kind, DIMS, ring_len), slots, int32(*(n for n, _ in pairs)), int32(*(f for _, f in pairs)))


@KIND
@pytest.mark.parametrize(
    "dims",
    [(1, 1, 1, 1), (2, 4, 16, 32), (3, 3, 33, 7), (5, 5, 96, 24), (1, 2, 256, 3), (1, 1, 5, 250), (1, 2, 128, 64)],
)
def test_head_counts_and_dims(kind, dims):
    """One row appends, one folds; K over several column blocks, V over several programs, with and without masks."""
    step(layer(kind, dims, ring_len=4), int32(2, 0), int32(2, 3))


def test_longest_ring_is_read_in_pieces():
    for kind in ("gdn", "kda"):
        step(layer(kind, (1, 1, 8, 4), 64), int32(0, 2, 1, 3), int32(62, 63, 33, 17), int32(0, 0, 1, 0))


@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_dtypes(io, state_dtype):
    for kind in ("gdn", "kda"):
        step(layer(kind, (1, 2, 12, 20), 4, io=io, state_dtype=state_dtype), int32(1, 0), int32(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_run_against_the_serial_recurrence(kind):
    """Staggered rows over two ring periods: outputs of every step, then the flushed state."""
    lay, slots, steps = layer(kind, (1, 2, 12, 20), 3), int32(2, 0), 8
    pool, state, tokens = Pool(lay, 3), lay.state(2), lay.tokens(steps, 2)
    pool.place(slots, state)
    force = torch.zeros(steps, 2, dtype=torch.int32)
    force[1, 0] = force[5, 1] = 1
    out = pool.run(tokens, slots, force)
    want_out, want_state = lay.serial(state, tokens)
    tolerance.assert_close(out, want_out, tolerance.output(12, 3), "output")
    tolerance.assert_close(pool.flushed(slots), want_state, tolerance.state(12, 3), "state")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_packed_and_rings_that_are_empty(kind, state_dtype):
    """Packed decode, a ring of one and a flush forced with an empty ring agree to the bit, and with the reference."""
    slots, results, inputs = int32(2, -1, 0), [], None
    for ring_len, force in ((1, None), (4, int32(1, 1, 1)), (None, None)):
        lay = layer(kind, (1, 2, 12, 20), ring_len or 2, state_dtype=state_dtype)
        pool = filled_pool(lay, slots, int32(0, 0, 0), 4)
        token = lay.tokens(1, 3)[0]
        if ring_len is None:
            inputs = (*token, lay.A_log, lay.dt_bias, None, pool.initial_state.clone(), slots)
            out = pool.packed_step(token, slots)
        else:
            out = decode(lay, pool, token, slots, int32(0, 0, 0), force)
        results.append((out, pool.initial_state))
    for out, state in results[:-1]:
        assert torch.equal(out, results[-1][0])
        assert same(state, results[-1][1])
    want_out, want_state = reference.packed_decode(*inputs, **lay.gate_args)
    tolerance.assert_close(out, want_out[:, 0], tolerance.output(12, 1), "output")
    live = [2, 0]
    tolerance.assert_close(state[live], want_state[live], tolerance.state(12, 1, state_dtype), "state")
    assert bool(state[[1, 3]].isnan().all())


@KIND
@pytest.mark.parametrize("poison", [NAN, 1e30])
def test_poison_changes_no_bit(kind, poison):
    """Free slots, dead records, the old output and the memory around the inputs hold poison, or zeros."""
    lay, slots, cursors, force = layer(kind, (1, 2, 12, 20), 4), int32(3, -1, 1), int32(2, 1, 1), int32(0, 0, 1)
    results = []
    for fill in (poison, 0.0):
        pool, token = filled_pool(lay, slots, cursors, 5, fill), []
        for x in lay.tokens(1, 3)[0]:
            wide = torch.full((5, *x.shape[1:-1], x.shape[-1] + 5), fill)
            wide[1:-1, ..., 2:-3] = x
            wide[2] = fill  # the padding row's own input
            token.append(wide[1:-1, ..., 2:-3])
        results.append((decode(lay, pool, tuple(token), slots, cursors, force), pool.packed_step(tuple(token), slots)))
    for a, b in zip(*results, strict=True):
        assert same(a, b)


@KIND
@pytest.mark.parametrize("slots", [int32(-1, 3), int32(3, -1), int32(3, -1, 0, -7), int32(-1, -1)])
def test_padding_rows(kind, slots):
    """Their output is zero, their NaN input is not read, and neither slot 0 nor another row stands in for them."""
    lay, live = layer(kind, (1, 2, 5, 6), 3), slots >= 0
    tokens = lay.tokens(1, len(slots))
    for x in tokens[:]:
        x[:, ~live] = NAN
    cursors = torch.arange(len(slots), dtype=torch.int32) % 3
    pool = filled_pool(lay, int32(0, 1, 2, 3, 4), int32(0, 0, 0, 0, 0), 5)
    pool.d_cache.fill_(0.5), pool.k_cache.fill_(0.25), pool.g_cache.fill_(-0.1)
    step(lay, slots, cursors, torch.ones_like(slots), pool=pool, token=tokens[0])
    before = pool.initial_state.clone()
    out = pool.packed_step(tokens[0], slots)
    assert torch.equal(out[~live], torch.zeros_like(out[~live]))
    others = [s for s in range(5) if s not in slots.tolist()]
    assert same(pool.initial_state[others], before[others])
    if bool(live.any()):
        want = Pool(lay, 5)
        want.initial_state.copy_(before)
        assert torch.equal(out[live], want.packed_step(rows_of(tokens, live)[0], slots[live]))
        assert same(pool.initial_state, want.initial_state)


@KIND
def test_strides(kind):
    """Pools, inputs, parameters, outputs and row vectors that are slices of something larger."""
    lay = layer(kind, (1, 2, 12, 20), 3, state_dtype=torch.bfloat16)
    slots, cursors, force = int32(1, 4, 2), int32(0, 2, 1), int32(0, 0, 1)
    pool, token = filled_pool(lay, slots, cursors, 5), lay.tokens(1, 3)[0]
    want, want_packed = step(lay, slots, cursors, force, pool=pool, token=token)[0], pool.packed_step(token, slots)

    strided, storage = filled_pool(lay, slots, cursors, 5), {}
    for name in ("initial_state", "d_cache", "k_cache", "g_cache"):
        tensor = getattr(strided, name)
        storage[name] = torch.full((5, 2, *tensor.shape[1:]), NAN, dtype=tensor.dtype)
        storage[name][:, 1] = tensor
        setattr(strided, name, storage[name][:, 1])
    mixed, a, b = token
    wide = torch.full((3, mixed.shape[1] + 7), NAN)
    wide[:, 3:-4] = mixed
    token = (wide[:, 3:-4], a.transpose(0, -1).contiguous().transpose(0, -1), b.t().contiguous().t())
    lay.A_log, lay.dt_bias = spread(lay.A_log), spread(lay.dt_bias)
    outs = torch.full((2, 3, 2, 2, 20), NAN)
    lay.empty_out = lambda rows: outs[0, :, 1:]
    got = decode(lay, strided, token, spread(slots), spread(cursors), spread(force))
    assert torch.equal(got, want)
    lay.empty_out = lambda rows: outs[1, :, 1:]
    assert torch.equal(strided.packed_step(token, spread(slots)), want_packed)
    assert bool(outs[:, :, 0].isnan().all())
    for name, whole in storage.items():
        assert bool(whole[:, 0].isnan().all()), f"{name}: wrote between the slots"
        assert same(whole[:, 1], getattr(pool, name)), name


def spread(x):
    """The same values, every other element of a larger tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 77).to(x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def test_value_heads_are_grouped_by_key_head():
    """Key head 1 is zero and nothing decays: the value heads of key head 1 keep their state, the others change."""
    lay = layer("gdn", (2, 4, 6, 3), ring_len=1)
    lay.A_log.fill_(-INF)
    token = lay.tokens(1, 1)[0]
    token[0][..., 3 * 6 : 4 * 6] = 0
    pool, before = filled_pool(lay, int32(0), int32(0), 1), None
    before = pool.initial_state.clone()
    step(lay, int32(0), int32(0), pool=pool, token=token)
    assert [torch.equal(pool.initial_state[0, hv], before[0, hv]) for hv in range(4)] == [False, False, True, True]


@KIND
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("factor", [100.0, 1e-3, 0.0])
def test_large_small_and_zero_keys(kind, l2norm, factor):
    if not l2norm and factor > 1:
        factor = 0.3
    lay = layer(kind, (1, 2, 12, 20), 4, l2norm=l2norm)
    token, slots, cursors = lay.tokens(1, 2)[0], int32(1, 0), int32(2, 3)
    token[0][:, :24] *= factor
    pool = filled_pool(lay, slots, cursors, 2)
    pool.k_cache *= factor
    step(lay, slots, cursors, pool=pool, token=token)


@KIND
@pytest.mark.parametrize("log_decay", [-30.0, math.log(1e-12), -1e-6])
def test_strong_and_weak_decay(kind, log_decay):
    """A ring of 16 at -30 a step: a cumulative sum would reach -480."""
    lay = layer(kind, (1, 2, 12, 20), 16)
    lay.A_log = torch.full((2,), math.log(-log_decay))
    lay.dt_bias.zero_()
    token, slots, cursors = lay.tokens(1, 2)[0], int32(0, 1), int32(14, 15)
    token[1].fill_(math.log(math.expm1(1.0)))  # softplus gives 1
    pool = filled_pool(lay, slots, cursors, 2)
    pool.g_cache *= -log_decay
    step(lay, slots, cursors, pool=pool, token=token)


@KIND
@pytest.mark.parametrize("at", [0, 5, 14, "now"])
def test_a_step_that_forgets_everything(kind, at):
    """Log decay -inf in one record or in the token itself, for one head and for part of its channels."""
    lay, slots, cursors = layer(kind, (1, 2, 12, 20), 16), int32(0, 1), int32(15, 14)
    pool, token = filled_pool(lay, slots, cursors, 2), lay.tokens(1, 2)[0]
    if at == "now":
        token[1][:, 1] = INF
    else:
        pool.g_cache[0, 1, at] = -INF
        pool.g_cache[1, 0, min(at, 13)] = -INF
        if kind == "kda":
            pool.g_cache[0, 1, at, ::2] = -0.3
    step(lay, slots, cursors, pool=pool, token=token)


@pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])
def test_gate_inputs_from_minus_to_plus_infinity(kind):
    """A row for each input; the g that is stored is right to a few roundings of itself, however small, and finite."""
    x = [-INF, -1e4, -100.0, -20.0, -8.0, 0.0, 19.9, 20.1, 88.0, 89.0, 1e4, INF]
    lay, rows = layer(kind, (1, 2, 3, 2), 2), len(x)
    lay.A_log, slots = torch.tensor([-10.0, 3.0]), torch.arange(rows, dtype=torch.int32)
    lay.dt_bias.zero_()
    token = lay.tokens(1, rows)[0]
    token[1].copy_(torch.tensor(x).view(-1, *[1] * (token[1].ndim - 1)).expand_as(token[1]))
    _, pool = step(lay, slots, torch.zeros_like(slots), token=token)
    args = (token[1], lay.A_log, lay.dt_bias)
    want = (
        reference.gdn_log_decay(*args) if kind == "gdn" else reference.kda_log_decay(*args, lay.spec.lower_bound)
    )  # fmt: skip
    got = pool.g_cache[:rows, :, 0].double()
    torch.testing.assert_close(got, want.clamp_min(LOG_DECAY_FLOOR), rtol=3e-6, atol=1e-37)


@KIND
def test_an_infinite_rate_times_no_gate_is_no_decay(kind):
    """e^100 is inf in fp32, softplus(-200) is 0."""
    lay = layer(kind, (1, 2, 3, 2), 2)
    lay.A_log, token = torch.full((2,), 100.0), lay.tokens(1, 1)[0]
    lay.dt_bias.zero_()
    token[1].fill_(-200.0)
    _, pool = step(lay, int32(0), int32(0), token=token)
    assert not pool.g_cache[0, :, 0].any()


def test_rounded_gate_parameters_are_widened_first():
    for kind in ("gdn", "kda"):
        lay = layer(kind, (1, 2, 12, 20), 2)
        lay.A_log, lay.dt_bias = torch.full((2,), 2.77).bfloat16(), lay.dt_bias.bfloat16()
        step(lay, int32(0, 1), int32(0, 1))


@pytest.mark.parametrize("packed", [False, True])
def test_fp16_state_saturates_instead_of_overflowing(packed):
    lay = layer("gdn", (1, 1, 2, 2), ring_len=1, state_dtype=torch.float16, l2norm=False)
    lay.A_log.fill_(-INF)
    token = lay.tokens(1, 1)[0]
    token[0].copy_(torch.tensor([0.0, 0.0, 1e-3, 0.0, 1e9, -1e9]))  # k small, so that d stays near v
    token[2].fill_(100.0)
    pool = Pool(lay, 1, 0.0)
    pool.packed_step(token, int32(0)) if packed else decode(lay, pool, token, int32(0), int32(0), None)
    assert pool.initial_state.flatten().tolist() == [65504.0, 0.0, -65504.0, 0.0]


@KIND
def test_output_may_be_wider_than_the_activations(kind):
    lay = layer(kind, (1, 2, 12, 20), 2, io=torch.bfloat16)
    narrow, token = lay.empty_out, lay.tokens(1, 1)[0]
    pools = [filled_pool(lay, int32(0), int32(0), 1) for _ in range(2)]
    rounded = decode(lay, pools[0], token, int32(0), int32(0), None)
    lay.empty_out = lambda rows: narrow(rows, torch.float32)
    assert torch.equal(decode(lay, pools[1], token, int32(0), int32(0), None).bfloat16(), rounded)


@KIND
def test_empty_batch(kind):
    lay = layer(kind, DIMS)
    pool, token = Pool(lay, 3), lay.tokens(1, 0)[0]
    assert pool.step(token, int32()).shape == (0, 3, 20)
    assert pool.packed_step(token, int32()).shape == (0, 3, 20)


@KIND
def test_pool_past_32_bit_offsets(kind, tmp_path):
    """Slot 69999 of pools with a slot stride of 2**15: the pools are sparse files, only their used pages exist."""
    lay, slots, cursors = layer(kind, (1, 1, 8, 4), 2, io=torch.bfloat16), int32(69_999, 69_998), int32(0, 1)
    small, token = filled_pool(lay, int32(1, 0), cursors, 2), lay.tokens(1, 2)[0]
    big = Pool(lay, 2)
    for name in ("initial_state", "d_cache", "k_cache", "g_cache"):
        tensor = getattr(small, name)
        whole = torch.from_file(str(tmp_path / name), shared=True, size=70_000 << 15, dtype=tensor.dtype)
        view = whole.as_strided((70_000, *tensor.shape[1:]), (1 << 15, *tensor.stride()[1:]))
        view[69_998:] = tensor
        setattr(big, name, view)
    out = decode(lay, big, token, slots, cursors, None)
    assert torch.equal(out, step(lay, int32(1, 0), cursors, pool=small, token=token)[0])
    packed = big.packed_step(token, slots), small.packed_step(token, int32(1, 0))
    assert torch.equal(*packed)
    for ours, theirs in zip(big.tensors, small.tensors, strict=True):
        assert same(ours[69_998:], theirs)
        assert not ours[0].any()
