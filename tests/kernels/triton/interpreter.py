"""Let Triton's interpreter serve as the backend of the CPU: import this first, in a process started with
TRITON_INTERPRET=1. A program takes 10 to 20 ms here, so the tests are short.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from replayssm.kernels import choose

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
