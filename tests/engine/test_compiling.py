"""A function that is compiled for many shapes never falls back to itself."""

from functools import partial

import torch
from torch._dynamo.testing import CompileCounter

from replayssm.engine.compiling import compile_shapes


def test_every_shape_is_compiled(monkeypatch):
    counter, shapes = CompileCounter(), 40

    def double(x):
        return x + x

    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
        function = compile_shapes(double, dynamic=False)
        for size in range(2, 2 + shapes):
            assert function(torch.ones(size)).shape == (size,)
    assert counter.frame_count == shapes
