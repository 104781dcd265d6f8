"""The stand-in with rounded operands: exact ones give the op itself, and the roundings are those of the hardware."""

import pytest
import torch

from replayssm import ops
from replayssm.study import rounding
from tests import tolerance
from tests.decode_case import KINDS, Pool, int32, layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"l2norm": False}, {"state_dtype": torch.bfloat16, "io": torch.bfloat16}])
def test_exact_operands_are_the_op(kind, options):
    lay, steps = layer(kind, (2, 4, 8, 6), 4, **options), 11
    slots, tokens, state = int32(3, 0, 1), lay.tokens(steps, 3), lay.state(3)
    force = (torch.rand(steps, 3, generator=torch.Generator().manual_seed(2)) < 0.3).int()
    mine, pool = Pool(lay, 4), Pool(lay, 4)
    for p in (mine, pool):
        p.place(slots, state)
    for t in range(steps):
        want = pool.step(tokens[t], slots, force[t])
        pos = ops.gather_cursors(mine.cursor, slots)
        out = lay.empty_out(3)
        rounding.op("exact")(
            *tokens[t], lay.A_log, lay.dt_bias, None, *mine.tensors, out, slots, pos, force[t], **lay.gate_args
        )
        ops.advance_cursors(mine.cursor, slots, 4, force[t])
        near = tolerance.relative_error(out[:, 0], want)
        assert near < (2**-7 if options.get("io") else 1e-5)
    for got, want in zip(mine.tensors, pool.tensors, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-6 if options.get("io") else 1e-4, atol=1e-5, equal_nan=True)


def test_operands_are_rounded_and_nothing_else():
    """One record: what is read of it moves by the rounding of its two operands, what is read of the checkpoint not."""
    lay = layer("gdn", (1, 1, 16, 16), 4)
    errors = {}
    for state in (0.0, 1.0):
        for name in ("tf32", "bf16"):
            outs = {}
            for operands in ("exact", name):
                pool, tokens = Pool(lay, 1, poison=0.0), lay.tokens(2, 1)
                pool.place(int32(0), lay.state(1) * state)
                for t in range(2):
                    outs[operands] = out = lay.empty_out(1)
                    rounding.op(operands)(
                        *tokens[t],
                        lay.A_log,
                        lay.dt_bias,
                        None,
                        *pool.tensors,
                        out,
                        int32(0),
                        int32(t),
                        **lay.gate_args,
                    )
            errors[name, state] = tolerance.relative_error(outs[name], outs["exact"])
    assert 2**-14 < errors["tf32", 0.0] < 2**-10
    assert 2**-11 < errors["bf16", 0.0] < 2**-7
    assert all(errors[name, 1.0] < errors[name, 0.0] for name in ("tf32", "bf16"))


@pytest.mark.parametrize(
    ("x", "want"),
    [(1.0, 1.0), (1 + 2**-10, 1 + 2**-10), (1 + 2**-11, 1 + 2**-10), (1 + 2**-12, 1.0), (-1 - 2**-11, -1 - 2**-10),
     (2 - 2**-12, 2.0), (3e-30, None), (0.0, 0.0)],
)  # fmt: skip
def test_tf32_keeps_ten_bits(x, want):
    got = float(rounding.tf32(torch.tensor([x]))[0])
    if want is None:
        assert abs(got - x) <= abs(x) * 2**-11
    else:
        assert got == want
