"""Compiles a Gluon kernel for a GPU that is not there, and reads registers and spills from the machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

ROWS = {"qkv_row", "a_row", "a_head", "a_chan", "b_row", "b_head", "out_row", "rows_total"}
INTEGERS = ROWS | {f"{pool}_{step}" for pool in ("state", "d", "k", "g") for step in ("slot", "layer")}
FLOATS = {"scale", "lower_bound", "beta_scale"}
FP32 = {"A_log", "dt_bias", "d_ring", "g_ring", "scratch"}
INT32 = {"slots", "write_pos", "force"}


class Usage(NamedTuple):
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_kernel(
    kernel: Any, constants: dict[str, Any], state: str, io: str, arch: int, num_warps: int, **options: Any
) -> Usage:
    """`constants`: the constexpr arguments, further ones are ignored; pointers and strides are taken as aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, values, attrs = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
            continue
        if name in FLOATS:
            signature[name] = "fp32"
            continue
        kind = "fp32" if name in FP32 else "i32" if name in INT32 else state if name == "state" else io
        signature[name] = "i32" if name in INTEGERS else f"*{kind}"
        if name not in ("rows_total", "a_chan", "b_head"):
            attrs[i,] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, **options})
    return usage(compiled.asm["cubin"], compiled.metadata.shared, Path(triton.__file__).parent)


def usage(cubin: bytes, shared: int, triton_dir: Path) -> Usage:
    import tempfile

    tool = triton_dir / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([str(tool), "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return Usage(int(found[1]), int(found[2]), shared)
