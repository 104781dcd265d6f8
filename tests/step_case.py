"""One decode of a batch against the fp64 reference, on any device.

`step` checks outputs, folded states, appended records, and that every other bit of the pools is as it was. The
reference keeps the same content in its ring, so a ring in any phase can be made up instead of being decoded into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm import ops, reference
from replayssm.kernels.torch_math import LOG_DECAY_FLOOR
from tests import tolerance
from tests.decode_case import NAN, Layer, Pool, Tokens


def bits(x: Tensor) -> Tensor:
    """Comparable bits: NaN equals the same NaN."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def filled_pool(lay: Layer, slots: Tensor, cursors: Tensor, count: int, poison: float = NAN, seed: int = 2) -> Pool:
    """A pool whose live slots hold a random state and `cursor` random records; everything else is poison."""
    pool = Pool(lay, count, poison)
    for slot, n in zip(slots.tolist(), cursors.tolist(), strict=True):
        if slot < 0:
            continue
        gen = torch.Generator().manual_seed(1000 * seed + slot)
        pool.initial_state[slot].copy_(torch.randn(pool.initial_state.shape[1:], generator=gen))
        for cache, make in ((pool.d_cache, torch.randn), (pool.k_cache, torch.randn), (pool.g_cache, torch.rand)):
            records = make(cache[slot].shape, generator=gen)
            cache[slot, :, :n].copy_((-records if make is torch.rand else records)[:, :n])
        pool.cursor[slot] = n
    return pool


def decode(lay: Layer, pool: Pool, token, slots: Tensor, cursors: Tensor, force: Tensor | None) -> Tensor:
    out = lay.empty_out(len(slots))
    slots, cursors, force = (None if x is None else x.to(lay.device) for x in (slots, cursors, force))
    ops.fused_recurrent_linear_replayssm_decode(
        *token, lay.A_log, lay.dt_bias, None, *pool.tensors, out, slots, cursors, force, **lay.gate_args
    )
    return out[:, 0]


def step(
    lay: Layer, slots: Tensor, cursors: Tensor, force: Tensor | None = None, count: int | None = None,
    pool: Pool | None = None, token: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Pool]:  # fmt: skip
    """One decode against the reference. Returns the output [B, HV, V] and the pool afterwards.

    slots, cursors and force are on the CPU, pool and token on the device of the layer.
    """
    pool = pool or filled_pool(lay, slots, cursors, count or int(slots.max()) + 2)
    token = token or lay.tokens(1, len(slots))[0]
    before = [t.cpu().clone() for t in pool.tensors]
    got = decode(lay, pool, token, slots, cursors, force)
    out, after = got.cpu(), [t.cpu() for t in pool.tensors]
    want_out, want = reference.replay_decode(
        *(x.cpu() for x in (*token, lay.A_log, lay.dt_bias)), None, *before, slots, cursors, force, **lay.gate_args
    )
    dim, ring_len = lay.spec.head_k_dim, lay.ring_len
    out_limit, d_limit = tolerance.output(dim, ring_len, lay.io), tolerance.output(dim, ring_len)
    state_limit = tolerance.state(dim, ring_len, lay.state_dtype)
    state, d_cache, k_cache, g_cache = after
    for row, (slot, n) in enumerate(zip(slots.tolist(), cursors.tolist(), strict=True)):
        what = f"row {row}, slot {slot}, cursor {n}"
        if slot < 0:
            assert torch.equal(out[row], torch.zeros_like(out[row])), what
            continue
        tolerance.assert_close(out[row], want_out[row, 0], out_limit, f"output of {what}")
        if n == ring_len - 1 or (force is not None and force[row]):
            tolerance.assert_close(state[slot], want.initial_state[slot], state_limit, f"state of {what}")
            before[0][slot] = state[slot]
        else:
            tolerance.assert_close(d_cache[slot, :, n], want.d_cache[slot, :, n], d_limit, f"d of {what}")
            want_g = want.g_cache[slot, :, n].clamp_min(LOG_DECAY_FLOOR)
            tolerance.assert_close(g_cache[slot, :, n], want_g, d_limit, f"g of {what}")
            assert same(k_cache[slot, :, n], want.k_cache[slot, :, n]), f"k of {what}"
            for old, new in zip(before[1:], after[1:], strict=True):
                old[slot, :, n] = new[slot, :, n]
    for old, new in zip(before, after, strict=True):
        assert same(old, new), "something was written that no row owns"
    return got, pool


def rows_of(tokens: Tokens, rows: Tensor | slice) -> Tokens:
    return Tokens(*(x[:, rows] for x in tokens[:]))
