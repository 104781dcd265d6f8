"""Every row of the launch table compiles ahead of time, as it is really launched, and leaves the room it counts on."""

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="Gluon needs triton >= 3.6")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set, so nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget

from replayssm.kernels.gluon import backend, launch
from tests.decode_case import Pool, int32, layer
from tests.kernels.gluon import case
from tests.kernels.gluon.aot import compiled
from tests.kernels.triton.aot import usage

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HEADS = {False: ("gdn", (16, 32, 128, 128)), True: ("kda", (32, 32, 128, 128))}
STATE = {4: FP32, 2: BF16}
SHARED, REGISTERS = 227 * 1024, 65536  # of a multiprocessor; the system takes 1 KiB of the former for each program
# Rows that hold a whole tile in registers have 8 and were the fastest of those timed; a compiler that gives less has
# regressed.
MIN_WARPS = 8
# Local memory of a thread where a register cap lets one more program on a multiprocessor: ten loop constants, with some
# versions of the compiler. Without a cap there is none.
SPARE_BYTES = 40
GLOBAL = re.compile(r"\b(?:ld|st|red|atom)\.global|\bcp\.async\S*\.global")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build(op, is_kda, state, ring_len, params=None, arch=90, io=BF16, rows=3):
    """The kernel of a launch, and what it uses."""
    kind, dims = HEADS[is_kda]
    lay = layer(kind, dims, ring_len, io=io, state_dtype=state)
    pools, slots, pos = Pool(lay, 2).tensors, torch.zeros(rows).int(), torch.zeros(rows).int()
    inputs = *(x[0] for x in lay.tokens(1, rows)[:]), *case.constants(lay, "cpu")
    out = lay.empty_out(rows)
    with compiled(backend, arch) as kernels:
        if op == "replay":
            backend.replay_decode(*inputs, *pools, out, slots, pos, pos, *case.gate(lay), params=params)
        elif op == "packed":
            backend.packed_decode(*inputs, pools[0], out, slots, *case.gate(lay), params=params)
        else:
            backend.flush(*pools, slots, pos, True)
    (kernel,) = kernels
    return kernel, usage(kernel, GPUTarget("cuda", arch, 32))


def check(kernel, used, row):
    streams = isinstance(row, launch.Stream)
    warps = row.warps + 4 * streams  # Triton adds the other warps in fours
    assert kernel.metadata.num_warps == warps
    assert used.spilled <= (SPARE_BYTES if row.maxnreg else 0), str(used)
    resident = min(REGISTERS // (used.registers * 32 * warps), SHARED // (used.shared + 1024))
    assert resident >= (row.per_sm if streams else MIN_WARPS // warps), str(used)


def check_early_start(kernel):
    """Such a launch may begin before the kernel before it has ended."""
    text = kernel.asm["ptx"]
    assert kernel.metadata.launch_pdl
    assert text.index("griddepcontrol.wait") < GLOBAL.search(text).start()


def distinct(table):
    return sorted({(key, row) for key, rows in table.items() for _, row in rows}, key=str)


@pytest.mark.parametrize(("key", "row"), distinct(launch.REPLAY), ids=str)
def test_replay_rows(key, row):
    kernel, used = build("replay", key[0], STATE[key[1]], launch.STREAM_RING, row)
    check(kernel, used, row)
    check_early_start(kernel)


@pytest.mark.parametrize(("key", "row"), distinct(launch.REPLAY_LONG), ids=str)
def test_replay_rows_of_long_rings(key, row):
    kernel, used = build("replay", key[0], STATE[key[1]], 16, row)
    check(kernel, used, row)
    check_early_start(kernel)


@pytest.mark.parametrize(("key", "row"), distinct(launch.PACKED), ids=str)
def test_packed_rows(key, row):
    kernel, used = build("packed", key[0], STATE[key[1]], 1, row)
    check(kernel, used, row)
    check_early_start(kernel)


@pytest.mark.parametrize("is_kda", HEADS)
@pytest.mark.parametrize("state", [FP32, BF16])
def test_fold(is_kda, state):
    check(*build("fold", is_kda, state, 16), launch.fold(state.itemsize, 128, 128, 16))


PADDED = [
    (("gdn-beta2", (30, 30, 96, 192)), FP32),
    (("gdn-beta2", (30, 30, 96, 192)), BF16),
    (("kda", (2, 2, 80, 48)), BF16),
]


@pytest.mark.parametrize(("heads", "state"), PADDED, ids=str)
def test_padded_heads(monkeypatch, heads, state):
    """Whole 16-byte pieces, no local memory without a cap; a staged row copies asynchronously."""
    is_kda = heads[0] == "kda"
    monkeypatch.setitem(HEADS, is_kda, heads)
    for op in ("replay", "packed", "fold"):
        kernel, used = build(op, is_kda, state, 8)
        assert used.spilled <= SPARE_BYTES
        assert "st.global.v4.b32" in kernel.asm["ptx"]
    _, v_dim, k_dim = heads[1][1:]
    staged = next(row for _, row in launch.PACKED[True, 2] if row.staged).fit(v_dim, k_dim, state.itemsize, 1)
    kernel, used = build("packed", is_kda, state, 1, staged)
    assert not used.spilled
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]


def test_a_state_of_fp16():
    """With fp16 activations; the rows are those of bf16."""
    row = launch.replay(True, 2, 8192, 128, 128, 8)
    check(*build("replay", True, FP16, 8, io=FP16, params=row), row)
    row = launch.packed(True, 2, 8192, 128, 128)
    check(*build("packed", True, FP16, 1, io=FP16, params=row), row)
    check(*build("fold", True, FP16, 8, io=FP16), launch.fold(2, 128, 128, 8))


@pytest.mark.parametrize("heads", [32, 8192])
def test_blackwell(heads):
    row = launch.replay(False, 4, heads, 128, 128, 8)
    kernel, used = build("replay", False, FP32, 8, row, arch=100)
    check(kernel, used, row)
    check_early_start(kernel)
    assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == isinstance(row, launch.Stream)


def test_one_tile_of_one_row():
    """Numbers that are 1 become constants of the compiler, also in the arguments of the warps that prepare."""
    lay = layer("gdn", (1, 1, 128, 128), 1)
    pools, out = Pool(lay, 1).tensors, lay.empty_out(1)
    inputs = *(x[0] for x in lay.tokens(1, 1)[:]), *case.constants(lay, "cpu")
    with compiled(backend, 90) as kernels:
        backend.replay_decode(
            *inputs, *pools, out, int32(0), int32(0), None, *case.gate(lay), params=launch.Stream(128, 64, 4, 2, 1)
        )
    assert len(kernels) == 1
