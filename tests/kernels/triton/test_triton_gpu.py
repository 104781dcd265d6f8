"""The portable kernels on a GPU, called as a backend: on geometries that the ops would give to other kernels, too."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from replayssm.kernels import torch_backend
from tests import tolerance
from tests.decode_case import Layer, Pool, Tokens, int32, layer
from tests.ops.gpu_case import BF16, DEVICE, FP32, GPU

pytestmark = GPU
KIND = pytest.mark.parametrize("kind", ["gdn", "kda", "kda-bounded"])


@pytest.fixture(scope="module")
def portable():
    """The portable kernels; without a GPU or the interpreter, the torch backend stands in."""
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return torch_backend
    pytest.importorskip("triton")
    from replayssm.kernels.triton import backend

    return backend


class Run:
    """Tokens through backends called directly; the cursor is moved by `mover`."""

    def __init__(self, mover, lay: Layer, slots: Tensor) -> None:
        self.mover, self.pool, self.slots = mover, Pool(lay, int(slots.max()) + 2), slots
        self.state = lay.state(len(slots))
        self.pool.place(slots, self.state)

    def step(self, backend, token: tuple[Tensor, Tensor, Tensor], force: Tensor | None) -> Tensor:
        """[B, HV, V]"""
        lay, out = self.pool.layer, self.pool.layer.empty_out(len(self.slots))
        pos = self.mover.gather_cursors(self.pool.cursor, self.slots)
        backend.replay_decode(
            *token, lay.A_log, lay.dt_bias, lay.spec.head_k_dim**-0.5, *self.pool.tensors, out, self.slots, pos, force,
            *lay.gate_args.values(),
        )  # fmt: skip
        self.mover.advance_cursors(self.pool.cursor, self.slots, lay.ring_len, force, None)
        return out[:, 0]

    def materialized(self, backend) -> Tensor:
        """The true states [B, HV, V, K]."""
        copy, pos = torch.zeros_like(self.pool.initial_state), self.mover.gather_cursors(self.pool.cursor, self.slots)
        backend.materialize(*self.pool.tensors, self.slots, pos, copy, self.slots, self.pool.layer.l2norm)
        return copy[self.slots.long()]


@KIND
@pytest.mark.parametrize("dims", [(1, 2, 128, 128), (1, 2, 96, 40)])
def test_state_error_does_not_grow_over_4096_steps(portable, kind, dims):
    """Random forced flushes on top of the full ones; the error at 4096 steps is bounded as at 256."""
    lay, steps = layer(kind, dims, 16, device=DEVICE), 4096
    lay.A_log.fill_(-4.0)  # decay near 1: the state remembers hundreds of steps
    force = (torch.rand(steps, 2, generator=torch.Generator().manual_seed(11)) < 0.05).int().to(DEVICE)
    run, tokens, start = Run(portable, lay, int32(1, 0).to(DEVICE)), lay.tokens(steps, 2), 0
    state = run.state
    for stop in (256, 1024, 4096):
        outs = torch.stack([run.step(portable, tokens[t], force[t]) for t in range(start, stop)])
        want, state = lay.serial(state, Tokens(*(x[start:stop] for x in tokens[:])))
        # Beside the readout itself, an output has the error of the state it reads.
        limit = tolerance.output(dims[2], 16) + tolerance.state(dims[2], 16)
        tolerance.assert_close(outs.cpu(), want, limit, f"outputs up to {stop}")
        error = tolerance.relative_error(run.materialized(portable).cpu(), state)
        assert error <= 2e-5, f"after {stop} steps: {error:.1e}"
        start = stop
    pos = portable.gather_cursors(run.pool.cursor, run.slots)
    portable.flush(*run.pool.tensors, run.slots, pos, lay.l2norm)
    error = tolerance.relative_error(run.pool.initial_state[run.slots.long()].cpu(), state)
    assert error <= 2e-5, f"flushed: {error:.1e}"


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("rows", [2, 16, 40])
def test_rows_of_the_launch_table(portable, kind, state_dtype, rows):
    """One ring period and a step, for few and for many programs."""
    heads = {"gdn": (16, 32), "kda": (32, 32)}[kind]
    lay = layer(kind, (*heads, 128, 128), 16, state_dtype=state_dtype, device=DEVICE)
    run, tokens = Run(portable, lay, torch.arange(rows, dtype=torch.int32, device=DEVICE)), lay.tokens(17, rows)
    outs = torch.stack([run.step(portable, tokens[t], None) for t in range(17)])
    some = [0, rows - 1]
    want, state = lay.serial(run.state[some], Tokens(*(x[:, some] for x in tokens[:])))
    limit = tolerance.state(128, 16, state_dtype, stores=2)
    out_limit = tolerance.output(128, 16) + (0 if state_dtype == FP32 else limit)
    tolerance.assert_close(outs[:, some].cpu(), want, out_limit, "output")
    tolerance.assert_close(run.materialized(portable)[some].cpu(), state, limit, "state")
    out = lay.empty_out(rows)
    weights = lay.A_log, lay.dt_bias, 128**-0.5
    before = run.pool.initial_state[:rows][some].clone()
    portable.packed_decode(*tokens[0], *weights, run.pool.initial_state, out, run.slots, *lay.gate_args.values())
    want, _ = lay.serial(before, Tokens(*(x[:1, some] for x in tokens[:])))
    tolerance.assert_close(out[some, 0].cpu(), want[0], tolerance.output(128, 1), "packed")


@KIND
def test_all_kernels_share_one_ring(portable, kind):
    """Each step by other kernels than the one before, with a step that forgets everything; then all of them fold."""
    backends = [portable, torch_backend]
    if DEVICE == "cuda":
        from replayssm.kernels.gluon import backend as gluon

        lay = layer(kind, (2, 4, 64, 32), 8, device=DEVICE)
        if gluon.supports(lay.state(1)) is None:
            backends.append(gluon)
    lay, steps = layer(kind, (2, 4, 64, 32), 8, device=DEVICE), 29
    tokens, run = lay.tokens(steps, 2), Run(portable, lay, int32(1, 0).to(DEVICE))
    tokens.a[[3, 4, 11], :, 1] = torch.inf
    tokens.a[26, 0] = torch.inf
    force = (torch.rand(steps, 2, generator=torch.Generator().manual_seed(3)) < 0.1).int().to(DEVICE)
    force[24:] = 0
    outs = torch.stack([run.step(backends[t % len(backends)], tokens[t], force[t]) for t in range(steps)])
    want, state = lay.serial(run.state, tokens)
    tolerance.assert_close(outs.cpu(), want, tolerance.output(64, 8), "output")
    assert bool((run.pool.cursor[:2] > 0).all())
    for backend in backends:
        pool = run.pool.on(DEVICE)
        pos = portable.gather_cursors(pool.cursor, run.slots)
        backend.flush(*pool.tensors, run.slots, pos, lay.l2norm)
        tolerance.assert_close(pool.initial_state[[1, 0]].cpu(), state, tolerance.state(64, 8), backend.__name__)
