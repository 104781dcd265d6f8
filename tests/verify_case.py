"""Windows of drafts against the fp64 reference, on any device: single verifies, and long runs with rejected drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm import ops, reference
from replayssm.kernels.torch_math import LOG_DECAY_FLOOR
from tests import tolerance
from tests.decode_case import NAN, Layer, Pool, Tokens, int32
from tests.step_case import filled_pool, same

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(lay: Layer, rows: int, tokens: int, seed: int = 3) -> Inputs:
    """mixed_qkv [B, T, ·], a [B, T, HV(, K)], b [B, T, HV]."""
    x, a, b = (t.transpose(0, 1).contiguous() for t in lay.tokens(tokens, rows, seed)[:])
    return x, a, b


def empty_out(lay: Layer, rows: int, tokens: int) -> Tensor:
    s = lay.spec
    return torch.full((rows, tokens, s.num_v_heads, s.head_v_dim), NAN, dtype=lay.io, device=lay.device)


def verify(
    lay: Layer, pool: Pool, window: Inputs, slots: Tensor, cursors: Tensor, lengths: Tensor,
    force: Tensor | None = None, out: Tensor | None = None, backend: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The op, or that of a backend; index tensors on any device. Returns out [B, T, HV, V]."""
    out = empty_out(lay, *window[0].shape[:2]) if out is None else out
    at = [None if x is None else x.to(lay.device) for x in (slots, cursors, lengths, force)]
    if backend is not None:
        weights = lay.A_log, lay.dt_bias, lay.spec.head_k_dim**-0.5
        backend.replay_verify(*window, *weights, *pool.tensors, out, *at, *lay.gate_args.values(), **options)
        return out
    result = ops.fused_recurrent_linear_replayssm_verify(
        *window, lay.A_log, lay.dt_bias, None, *pool.tensors, out, *at, **lay.gate_args
    )
    assert result is out
    return out


def limits(lay: Layer, tokens: int) -> tuple[float, float, float]:
    """Of outputs, of d, of states. A window of T tokens sums T products more, and passes through T of its own d."""
    k, reach = lay.spec.head_k_dim, lay.ring_len + tokens
    return (
        tolerance.output(k, reach, lay.io) + tolerance.arithmetic(k, reach),
        tolerance.output(k, reach) + tolerance.arithmetic(k, reach),
        tolerance.state(k, lay.ring_len, lay.state_dtype),
    )


def step(
    lay: Layer, slots: Tensor, cursors: Tensor, lengths: Tensor, tokens: int, force: Tensor | None = None,
    pool: Pool | None = None, window: Inputs | None = None, **options: Any,
) -> tuple[Tensor, Pool]:  # fmt: skip
    """One verify against the reference: outputs, folded states, records, and that nothing else has changed a bit.

    slots, cursors, lengths, force are on the CPU; pool and window on the device of the layer.
    """
    pool = pool or filled_pool(lay, slots, cursors, int(slots.max()) + 2)
    window = window or inputs(lay, len(slots), tokens)
    before = [t.cpu().clone() for t in pool.tensors]
    out = verify(lay, pool, window, slots, cursors, lengths, force, **options).cpu()
    state, *caches = [t.cpu() for t in pool.tensors]
    want_out, want = reference.ring_verify(
        *(x.cpu() for x in (*window, lay.A_log, lay.dt_bias)), None, *before, slots, cursors, lengths, force,
        **lay.gate_args,
    )  # fmt: skip
    out_limit, d_limit, state_limit = limits(lay, tokens)
    rows = zip(slots.tolist(), cursors.tolist(), lengths.tolist(), strict=True)
    for row, (slot, n, length) in enumerate(rows):
        what = f"row {row}, slot {slot}, cursor {n}, length {length}"
        live = length if slot >= 0 else 0
        assert not out[row, live:].any(), f"dead tokens of {what}"
        tolerance.assert_close(out[row, :live], want_out[row, :live], out_limit, f"output of {what}")
        if slot < 0:
            continue
        flushed = reference.flushes_early(n, length, lay.ring_len, force is not None and bool(force[row]))
        first = 0 if flushed else n
        if flushed and n:
            tolerance.assert_close(state[slot], want.initial_state[slot], state_limit, f"state of {what}")
            before[0][slot] = state[slot]
        for t in range(first, first + length):
            got, expected = ([x[slot, :, t] for x in side] for side in (caches, want[1:]))
            tolerance.assert_close(got[0], expected[0], d_limit, f"d {t} of {what}")
            tolerance.assert_close(got[2], expected[2].clamp_min(LOG_DECAY_FLOOR), d_limit, f"g {t} of {what}")
            assert same(got[1], expected[1]), f"k {t} of {what}"
        for old, new in zip(before[1:], caches, strict=True):
            old[slot, :, first : first + length] = new[slot, :, first : first + length]
    for old, new in zip(before, (state, *caches), strict=True):
        assert same(old, new), "something was written that no row owns"
    return out, pool


@dataclass
class Run:
    """Rows that go through a stream of tokens, each at its own pace: decoded one by one, or verified in windows of
    which the first part comes from the stream and the rest is something else, to be rejected.
    """

    lay: Layer
    slots: Tensor
    steps: int
    count: int = 0
    pool: Pool = field(init=False)
    state: Tensor = field(init=False)
    stream: Tokens = field(init=False)
    done: list[int] = field(init=False)
    outs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, s = len(self.slots), self.lay.spec
        self.pool = Pool(self.lay, self.count or int(self.slots.max()) + 2)
        self.state = self.lay.state(rows)
        self.pool.place(self.slots.to(self.lay.device), self.state)
        self.stream = self.lay.tokens(self.steps, rows, 3)
        self.done = [0] * rows
        self.outs = torch.zeros(self.steps, rows, s.num_v_heads, s.head_v_dim, dtype=torch.float64)

    def left(self, row: int) -> int:
        return self.steps - self.done[row]

    def decode(self) -> None:
        """One token of the stream in each row that has one left."""
        rows = [row for row in range(len(self.slots)) if self.left(row)]
        token = tuple(torch.stack([x[self.done[row], row] for row in rows]) for x in self.stream[:])
        out = self.pool.step(token, self.slots[rows].to(self.lay.device)).cpu().double()  # type: ignore[arg-type]
        for i, row in enumerate(rows):
            self.outs[self.done[row], row] = out[i]
            self.done[row] += 1

    def verify(self, tokens: int, lengths: list[int], accepted: list[int], force: Tensor | None = None) -> None:
        """A window; `accepted` of a row is cut to what its stream has left."""
        lay, rows = self.lay, range(len(self.slots))
        accepted = [min(accepted[row], lengths[row], self.left(row)) for row in rows]
        window = inputs(lay, len(self.slots), tokens, seed=1000 + sum(self.done))
        for row in rows:
            now = slice(self.done[row], self.done[row] + accepted[row])
            for x, source in zip(window, self.stream[:], strict=True):
                x[row, : accepted[row]] = source[now, row]
                x[row, lengths[row] :] = NAN
        slots, m, kept = (x.to(lay.device) for x in (self.slots, int32(*lengths), int32(*accepted)))
        force = None if force is None else force.to(lay.device)
        pos = ops.gather_cursors(self.pool.cursor, slots)
        out = verify(lay, self.pool, window, slots, pos, m, force).cpu().double()
        ops.commit_cursors(self.pool.cursor, slots, lay.ring_len, m, kept, force)
        for row in rows:
            self.outs[self.done[row] : self.done[row] + accepted[row], row] = out[row, : accepted[row]]
            self.done[row] += accepted[row]

    def truth(self) -> tuple[Tensor, Tensor]:
        """fp64: outputs [T, B, HV, V], zero where a row has not come, and the states of the rows where they are."""
        want, states = torch.zeros_like(self.outs), []
        for row, done in enumerate(self.done):
            mine = Tokens(*(x[:done, row : row + 1] for x in self.stream[:]))
            start = self.state[row : row + 1]
            out, state = self.lay.serial(start, mine) if done else (want[:0, :1], start.cpu().double())
            want[:done, row] = out[:, 0]
            states.append(state[0])
        return want, torch.stack(states)

    def states(self) -> Tensor:
        """The true states, on the CPU; the pool stays as it is."""
        slots, copy = self.slots.to(self.lay.device), torch.full_like(self.pool.initial_state, NAN)
        pos = ops.gather_cursors(self.pool.cursor, slots)
        ops.materialize(*self.pool.tensors, slots, pos, copy, slots, self.lay.l2norm)
        return copy[slots.long()].cpu()

    def check(self, tokens: int) -> None:
        """Outputs of all that was kept, and states, from the materialized copy and after a flush."""
        out_limit, _, state_limit = limits(self.lay, tokens)
        want, states = self.truth()
        if self.lay.state_dtype != torch.float32:
            out_limit, state_limit = out_limit + state_limit, 3 * state_limit
        tolerance.assert_close(self.outs, want, out_limit, "outputs")
        tolerance.assert_close(self.states(), states, state_limit, "materialized states")
        got = self.pool.flushed(self.slots.to(self.lay.device)).cpu()
        tolerance.assert_close(got, states, state_limit, "flushed states")
