"""Runs of a backend over many tokens, compared with the oracle, and single launches. For emulator and GPU alike."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.spec import LayerSpec
from tests import tolerance
from tests.decode_case import NAN, Layer, Pool, Tokens, int32

# Padding first, in the middle and last; slots 0, 2 and 4 belong to nobody, and a stream copies slot 0 for padding.
SLOTS = int32(-1, 3, -7, 1, 5, -1)
GARBAGE = int32(-1, 0, 7, 1 << 20, 2**31 - 1, -(2**31))  # cursors and flags of padding rows


class Past(NamedTuple):
    """What a batch goes through, and what the oracle says of some of its rows."""

    start: Tensor
    tokens: Tokens
    rows: list[int]
    outs: Tensor
    state: Tensor


def past(lay: Layer, tokens: Tokens, rows: list[int]) -> Past:
    """The states at the start are numbers of every dtype, so that one oracle serves all."""
    start = (Layer(lay.spec).state(tokens.b.shape[1]) * 16).round() / 16
    return Past(start, tokens, rows, *lay.serial(start[rows], Tokens(*(x[:, rows] for x in tokens[:]))))


@lru_cache(maxsize=4)
def random_past(spec: LayerSpec, io: torch.dtype, l2norm: bool, steps: int, batch: int, rows: tuple[int, ...]) -> Past:
    lay = Layer(spec, io=io, l2norm=l2norm)
    return past(lay, lay.tokens(steps, batch, 3), list(rows))


def owners(slots: Tensor) -> list[int]:
    """Rows that are no padding."""
    return [row for row, slot in enumerate(slots.tolist()) if slot >= 0]


def garbage(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return GARBAGE[torch.randint(len(GARBAGE), shape, generator=gen)]


def replay(
    backend: Any,
    lay: Layer,
    steps: int,
    device: str = "cpu",
    strided: bool = False,
    slots: Tensor = SLOTS,
    known: Past | None = None,
    watch: bool = True,
    **options: Any,
) -> None:
    """`steps` tokens with random forced flushes, then a flush; outputs and states against the fp64 recurrence.

    What nobody owns is NaN: other slots, dead records, the gaps between strided rows. `watch`: a step must not change
    a bit of it, nor of a record, nor of a state that is not folded.
    """
    rows, gen = owners(slots), torch.Generator().manual_seed(5)
    batch = len(slots)
    known = known or random_past(lay.spec, lay.io, lay.l2norm, steps, batch, tuple(rows))
    pools = placed(lay, slots, known.start, device, strided)
    tokens, weights, at = known.tokens.on(device), constants(lay, device), slots.to(device)
    chance = torch.rand(steps, batch, generator=gen) < 0.15
    force = garbage((steps, batch), gen)
    force[:, rows] = 3 * chance[:, rows].int()
    cursor, outs = garbage((batch,), gen), []
    cursor[rows] = 0
    for t in range(steps):
        pos, flags = cursor.to(device), force[t].to(device)
        before = watched(lay, pools, slots, cursor) if watch else None
        out = stretched(lay.empty_out(batch).to(device), strided)
        inputs = token(tokens, t, strided)
        backend.replay_decode(*inputs, *weights, *pools, out, at, pos, flags, *gate(lay), **options)
        folds = chance[t] | (cursor == lay.ring_len - 1)
        if before:
            assert_only_due_changes(before, pools, slots, cursor, folds)
        outs.append(out[:, 0].cpu())
        cursor[rows] = torch.where(folds, 0, cursor + 1)[rows]
    backend.flush(*pools, at, cursor.to(device), lay.l2norm)
    stores = 1 if lay.state_dtype == torch.float32 else 2 + steps // lay.ring_len + int(chance.sum(0).max())
    check(lay, known, slots, torch.stack(outs), pools, stores)


def packed(
    backend: Any,
    lay: Layer,
    steps: int,
    device: str = "cpu",
    strided: bool = False,
    slots: Tensor = SLOTS,
    **options: Any,
) -> None:
    """As `replay`, with the packed kernel."""
    batch = len(slots)
    known = random_past(lay.spec, lay.io, lay.l2norm, steps, batch, tuple(owners(slots)))
    state = placed(lay, slots, known.start, device, strided)[0]
    tokens, weights, at = known.tokens.on(device), constants(lay, device), slots.to(device)
    outs = []
    for t in range(steps):
        out = stretched(lay.empty_out(batch).to(device), strided)
        inputs = token(tokens, t, strided)
        backend.packed_decode(*inputs, *weights, state, out, at, *gate(lay), **options)
        outs.append(out[:, 0].cpu())
    stores = 1 if lay.state_dtype == torch.float32 else steps + 1
    check(lay, known, slots, torch.stack(outs), [state], stores)


class Moment(NamedTuple):
    """A batch before one step: its inputs, and pools whose rings hold `cursor` records."""

    lay: Layer
    slots: Tensor
    cursor: Tensor
    force: Tensor | None
    inputs: list[Tensor]
    pools: list[Tensor]
    fill: float

    def step(self, backend: Any, op: str = "replay", **options: Any) -> list[Tensor]:
        """The output and the pools after it; `packed` has no rings."""
        out, pools = torch.full_like(self.lay.empty_out(len(self.slots)), self.fill), [x.clone() for x in self.pools]
        out = out.to(self.slots.device)
        rings, cursors = (pools[1:], (self.cursor, self.force)) if op == "replay" else ((), ())
        decode = backend.replay_decode if op == "replay" else backend.packed_decode
        decode(
            *self.inputs, *constants(self.lay, str(out.device)), pools[0], *rings, out, self.slots, *cursors,
            *gate(self.lay), **options,
        )  # fmt: skip
        return [out, *pools]


def moment(
    lay: Layer,
    slots: Tensor,
    cursor: Tensor,
    force: Tensor | None,
    device: str = "cpu",
    poison: float = NAN,
    sick: dict[int, float] | None = None,
) -> Moment:
    """poison: what nobody owns; sick: rows whose inputs are all of one value."""
    gen, count = torch.Generator().manual_seed(9), int(slots.max()) + 2
    pools = [torch.randn(x.shape, generator=gen).to(x.dtype) for x in Pool(lay, count).tensors]
    pools[3] = -pools[3].abs() / 4
    pools[0][unowned(slots, count)] = poison
    bury(pools, dead_records(lay, slots, cursor, count), poison)
    inputs = [x[0].clone() for x in lay.tokens(1, len(slots), 3)[:]]
    for row, fill in (sick or {}).items():
        for x in inputs:
            x[row] = fill
    force = None if force is None else force.to(device)
    pools, inputs = [x.to(device) for x in pools], [x.to(device) for x in inputs]
    return Moment(lay, slots.to(device), cursor.to(device), force, inputs, pools, poison)


def assert_nothing_leaks(
    backend: Any, lay: Layer, slots: Tensor, cursor: Tensor, force: Tensor, device: str = "cpu", **options: Any
) -> None:
    """Neither poison nor rows with NaN or inf for inputs change a bit of what other rows get; nor does repeating."""
    args = lay, slots, cursor, force, device
    rows, batch = owners(slots), len(slots)
    padding = sorted(set(range(batch)) - set(rows))
    clean = moment(*args, poison=0.0).step(backend, **options)
    assert not clean[0][padding].any(), "a padding row must be zero"
    folds = (force != 0) | (cursor == lay.ring_len - 1)
    appended = 0 if options.get("op") == "packed" else (~folds).int()
    dead = dead_records(lay, slots, cursor + appended, len(clean[1]))
    for poison in (NAN, float("inf"), NAN):
        got = moment(*args, poison=poison).step(backend, **options)
        for out in (got, clean):
            out[1][unowned(slots, len(out[1]))] = 0.0
            bury(out[1:], dead, 0.0)
        assert same(got, clean), f"{poison} where nobody looks changed the result"
    for sick in ({rows[0]: NAN, rows[-1]: float("inf")}, {rows[1]: -float("inf"), padding[0]: NAN}):
        got = moment(*args, poison=0.0, sick=sick).step(backend, **options)
        well = [row for row in range(batch) if row not in sick]
        mine = [int(slots[row]) for row in well if row in rows]
        assert same([got[0][well]], [clean[0][well]]), "a row got the numbers of another"
        assert same([x[mine] for x in got[1:]], [x[mine] for x in clean[1:]]), "a slot got the numbers of another"


def placed(lay: Layer, slots: Tensor, start: Tensor, device: str, strided: bool) -> list[Tensor]:
    """Pools that are NaN but for the states of the rows."""
    rows = owners(slots)
    pool = Pool(lay.on(device), int(slots.max()) + 2)
    pool.place(slots[rows].to(device), start[rows].to(device))
    return [stretched(x, strided) for x in pool.tensors]


def stretched(x: Tensor, strided: bool) -> Tensor:
    """With `strided`, the same values with twice the stride on the first axis and NaN between them."""
    if not strided:
        return x
    wide = torch.full((x.shape[0], 2, *x.shape[1:]), NAN, dtype=x.dtype, device=x.device)
    wide[:, 1] = x
    return wide[:, 1]


def token(tokens: Tokens, t: int, strided: bool) -> list[Tensor]:
    """Inputs of a step. With `strided`, packed rows have gaps, and the heads of gates are far apart."""
    mixed, *gates = tokens[t]
    if strided:
        gates = [stretched(x.mT.contiguous(), True).mT for x in gates]
    return [stretched(mixed, strided), *gates]


def constants(lay: Layer, device: str) -> tuple[Tensor, Tensor, float]:
    return lay.A_log.to(device), lay.dt_bias.to(device), lay.spec.head_k_dim**-0.5


def gate(lay: Layer) -> tuple[object, ...]:
    return lay.l2norm, lay.spec.is_kda, lay.spec.lower_bound, lay.spec.beta_scale


def unowned(slots: Tensor, count: int) -> list[int]:
    return sorted(set(range(count)) - set(slots.tolist()))


def dead_records(lay: Layer, slots: Tensor, cursor: Tensor, count: int) -> Tensor:
    """Which records hold nothing [slots, L]."""
    rows = owners(slots)
    dead = torch.ones(count, lay.ring_len, dtype=torch.bool)
    dead[slots[rows].long()] = torch.arange(lay.ring_len) >= cursor[rows, None]
    return dead


def bury(pools: list[Tensor], dead: Tensor, poison: float = NAN) -> None:
    for cache in pools[1:]:
        cache.masked_fill_(across(dead, cache), poison)


def across(records: Tensor, cache: Tensor) -> Tensor:
    """A mask of records [slots, L] as a mask of a cache [slots, ·, L(, ·)]."""
    records = records.to(cache.device)[:, None]
    return records if cache.ndim == 3 else records[..., None]


def watched(lay: Layer, pools: list[Tensor], slots: Tensor, cursor: Tensor) -> list[Tensor]:
    """Bury what is dead; the pools before a step."""
    bury(pools, dead_records(lay, slots, cursor, len(pools[0])))
    return [bits(x).clone() for x in pools]


def assert_only_due_changes(
    before: list[Tensor], pools: list[Tensor], slots: Tensor, cursor: Tensor, folds: Tensor
) -> None:
    records = torch.zeros(len(pools[0]), pools[1].shape[2], dtype=torch.bool)
    states = torch.zeros(len(pools[0]), dtype=torch.bool)
    for row in owners(slots):
        if folds[row]:
            states[slots[row]] = True
        else:
            records[slots[row], cursor[row]] = True
    due = [states.to(pools[0].device)[:, None, None, None], *(across(records, cache) for cache in pools[1:])]
    for name, old, now, change in zip(("state", "d", "k", "g"), before, pools, due, strict=True):
        assert bool(((bits(now) == old) | change).all()), f"{name} was written where nothing is due"
        assert not bool((now.isnan() & change).any()), f"{name} was not written where it is due"


def bits(x: Tensor) -> Tensor:
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(one, other, strict=True))


def check(lay: Layer, known: Past, slots: Tensor, outs: Tensor, pools: list[Tensor], stores: int) -> None:
    k, state = lay.spec.head_k_dim, pools[0]
    state_limit = tolerance.state(k, lay.ring_len, lay.state_dtype, stores)
    out_limit = tolerance.output(k, lay.ring_len, lay.io)
    if lay.state_dtype != torch.float32:
        out_limit += state_limit
    padding = sorted(set(range(len(slots))) - set(owners(slots)))
    assert not outs[:, padding].any(), "a padding row must be zero"
    tolerance.assert_close(outs[:, known.rows], known.outs, out_limit, "output")
    tolerance.assert_close(state[slots[known.rows].long()].cpu(), known.state, state_limit, "state")
    assert bool(state[unowned(slots, len(state))].isnan().all()), "a slot outside the batch was written"
    for x in pools:
        if not x.is_contiguous():
            assert bool(x._base[:, 0].isnan().all()), "a gap between slots was written"  # type: ignore[index]
