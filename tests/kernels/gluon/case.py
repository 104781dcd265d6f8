"""One run of a backend over many tokens, compared with the oracle. Serves the emulator and the GPU alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import tolerance
from tests.decode_case import Layer, Pool, Tokens, int32

SLOTS = int32(3, -1, 0, 5)  # slots 1, 2 and 4 belong to nobody
LIVE = [0, 2, 3]


def replay(backend: Any, lay: Layer, steps: int, device: str = "cpu", strided: bool = False, **options: Any) -> None:
    """`steps` tokens with random forced flushes, then a flush; outputs and states against the fp64 recurrence."""
    pool, tokens, start = placed(lay, strided)
    force = (torch.rand(steps, len(SLOTS), generator=torch.Generator().manual_seed(5)) < 0.15).int()
    tokens = lay.tokens(steps, len(SLOTS), 3)
    moved = [t.to(device) for t in pool.tensors]
    if strided:
        moved = [every_second(t) for t in moved]
    cursor, outs = [0] * len(SLOTS), []
    for t in range(steps):
        out = lay.empty_out(len(SLOTS)).to(device)
        pos = int32(*cursor).to(device)
        backend.replay_decode(
            *token(tokens, t, device, strided), *constants(lay, device), *moved, out, SLOTS.to(device), pos,
            force[t].to(device), *gate(lay), **options,
        )  # fmt: skip
        for i in LIVE:
            cursor[i] = 0 if force[t, i] or cursor[i] + 1 == lay.ring_len else cursor[i] + 1
        outs.append(out[:, 0].cpu())
    backend.flush(*moved, SLOTS.to(device), int32(*cursor).to(device), lay.l2norm)
    stores = 1 if lay.state_dtype == torch.float32 else 2 + steps // lay.ring_len + int(force.sum(0).max())
    check(lay, tokens, start, torch.stack(outs), moved[0].cpu(), stores)


def packed(backend: Any, lay: Layer, steps: int, device: str = "cpu", strided: bool = False, **options: Any) -> None:
    """As `replay`, with the packed kernel."""
    pool, tokens, start = placed(lay, strided)
    tokens = lay.tokens(steps, len(SLOTS), 3)
    state = pool.initial_state.to(device)
    state = every_second(state) if strided else state
    outs = []
    for t in range(steps):
        out = lay.empty_out(len(SLOTS)).to(device)
        args = (*token(tokens, t, device, strided), *constants(lay, device))
        backend.packed_decode(*args, state, out, SLOTS.to(device), *gate(lay), **options)
        outs.append(out[:, 0].cpu())
    check(lay, tokens, start, torch.stack(outs), state.cpu(), 1 if lay.state_dtype == torch.float32 else steps + 1)


def placed(lay: Layer, strided: bool) -> tuple[Pool, Tokens, Tensor]:
    pool, start = Pool(lay, 6), lay.state(len(LIVE))
    pool.place(SLOTS[LIVE], start)
    return pool, lay.tokens(1, 1), start


def every_second(x: Tensor, fill: float = float("nan")) -> Tensor:
    """The same values with twice the stride on the first axis."""
    wide = torch.full((x.shape[0], 2, *x.shape[1:]), fill, dtype=x.dtype, device=x.device)
    wide[:, 1] = x
    return wide[:, 1]


def token(tokens: Tokens, t: int, device: str, strided: bool) -> list[Tensor]:
    parts = [x.to(device) for x in tokens[t]]
    if strided:
        parts = [every_second(parts[0]), *(every_second(x.mT.contiguous()).mT for x in parts[1:])]
    return parts


def constants(lay: Layer, device: str) -> tuple[Tensor, Tensor, float]:
    return lay.A_log.to(device), lay.dt_bias.to(device), lay.spec.head_k_dim**-0.5


def gate(lay: Layer) -> tuple[object, ...]:
    return lay.l2norm, lay.spec.is_kda, lay.spec.lower_bound, lay.spec.beta_scale


def check(lay: Layer, tokens: Tokens, start: Tensor, outs: Tensor, state: Tensor, stores: int) -> None:
    mine = Tokens(*(x[:, LIVE] for x in tokens[:]))
    want, final = lay.serial(start, mine)
    state_limit = tolerance.state(lay.spec.head_k_dim, lay.ring_len, lay.state_dtype, stores)
    out_limit = tolerance.output(lay.spec.head_k_dim, lay.ring_len, lay.io)
    if lay.state_dtype != torch.float32:
        out_limit += state_limit
    tolerance.assert_close(outs[:, LIVE], want, out_limit, "output")
    tolerance.assert_close(state[SLOTS[LIVE].long()], final, state_limit, "state")
    assert not outs[:, 1].any(), "a padding row must be zero"
    assert bool(state[[1, 2, 4]].isnan().all()), "a slot outside the batch was written"
