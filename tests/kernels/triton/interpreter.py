"""Run the Triton backend on the CPU: import this first, in a process started with TRITON_INTERPRET=1.

`step` checks one decode of a batch against the fp64 reference: outputs, folded states, appended records, and that
every other bit of the pools is as it was. The reference keeps the same content in its ring, so a ring in any phase
can be made up instead of being decoded into, which keeps these tests short (a program takes 10 to 20 ms here).
"""

from __future__ import annotations

import os

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from torch import Tensor

from replayssm import ops, reference
from replayssm.kernels import choose
from tests import tolerance
from tests.decode_case import NAN, Layer, Pool, Tokens

assert os.environ.get("TRITON_INTERPRET") == "1", "the kernels are interpreted only if this is set before the import"


def _allow_data_dependent_ranges() -> None:
    """Triton 3.6 converts a loop bound by int(array of one element), which numpy 2.4 no longer takes."""
    patch = triton_interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    triton_interpreter._patch_lang_tensor = patched


def _round_to_bf16() -> None:
    """The interpreter cuts fp32 to bf16; a GPU rounds to nearest even, and so must the numbers compared here."""
    convert = triton_interpreter._convert_float

    def rounding(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    triton_interpreter._convert_float = rounding


_allow_data_dependent_ranges()
_round_to_bf16()
choose._loaded["cpu"] = __import__("replayssm.kernels.triton.backend", fromlist=["backend"])


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
        pool.initial_state[slot] = torch.randn(pool.initial_state.shape[1:], generator=gen).to(lay.state_dtype)
        for cache, make in ((pool.d_cache, torch.randn), (pool.k_cache, torch.randn), (pool.g_cache, torch.rand)):
            records = make(cache[slot].shape, generator=gen)
            cache[slot, :, :n] = (-records if make is torch.rand else records)[:, :n].to(cache.dtype)
        pool.cursor[slot] = n
    return pool


def decode(lay: Layer, pool: Pool, token, slots: Tensor, cursors: Tensor, force: Tensor | None) -> Tensor:
    out = lay.empty_out(len(slots))
    ops.fused_recurrent_linear_replayssm_decode(
        *token, lay.A_log, lay.dt_bias, None, *pool.tensors, out, slots, cursors, force, **lay.gate_args
    )
    return out[:, 0]


def step(
    lay: Layer, slots: Tensor, cursors: Tensor, force: Tensor | None = None, count: int | None = None,
    pool: Pool | None = None, token: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Pool]:  # fmt: skip
    """One decode against the reference. Returns the output [B, HV, V] and the pool afterwards."""
    pool = pool or filled_pool(lay, slots, cursors, count or int(slots.max()) + 2)
    token = token or lay.tokens(1, len(slots))[0]
    before = [t.clone() for t in pool.tensors]
    out = decode(lay, pool, token, slots, cursors, force)
    want_out, want = reference.replay_decode(
        *token, lay.A_log, lay.dt_bias, None, *before, slots, cursors, force, **lay.gate_args
    )
    dim, ring_len = lay.spec.head_k_dim, lay.ring_len
    out_limit, d_limit = tolerance.output(dim, ring_len, lay.io), tolerance.output(dim, ring_len)
    state_limit = tolerance.state(dim, ring_len, lay.state_dtype)
    for row, (slot, n) in enumerate(zip(slots.tolist(), cursors.tolist(), strict=True)):
        what = f"row {row}, slot {slot}, cursor {n}"
        if slot < 0:
            assert torch.equal(out[row], torch.zeros_like(out[row])), what
            continue
        tolerance.assert_close(out[row], want_out[row, 0], out_limit, f"output of {what}")
        if n == ring_len - 1 or (force is not None and force[row]):
            tolerance.assert_close(pool.initial_state[slot], want.initial_state[slot], state_limit, f"state of {what}")
            before[0][slot] = pool.initial_state[slot]
        else:
            tolerance.assert_close(pool.d_cache[slot, :, n], want.d_cache[slot, :, n], d_limit, f"d of {what}")
            if bool(torch.isfinite(want.g_cache[slot, :, n]).all()):
                tolerance.assert_close(pool.g_cache[slot, :, n], want.g_cache[slot, :, n], d_limit, f"g of {what}")
            else:
                torch.testing.assert_close(pool.g_cache[slot, :, n], want.g_cache[slot, :, n])
            assert same(pool.k_cache[slot, :, n], want.k_cache[slot, :, n]), f"k of {what}"
            for old, new in zip(before[1:], pool.tensors[1:], strict=True):
                old[slot, :, n] = new[slot, :, n]
    for old, new in zip(before, pool.tensors, strict=True):
        assert same(old, new), "something was written that no row owns"
    return out, pool


def rows_of(tokens: Tokens, rows: Tensor | slice) -> Tokens:
    return Tokens(*(x[:, rows] for x in tokens[:]))
