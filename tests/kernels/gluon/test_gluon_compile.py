"""Every row of the launch table compiles ahead of time, without spills and within its registers."""

import pytest

pytest.importorskip("triton", reason="Gluon needs triton >= 3.6")

from replayssm.kernels.gluon import launch
from replayssm.kernels.gluon.fold import fold_rows
from replayssm.kernels.gluon.fused import replay_fused
from replayssm.kernels.gluon.packed import packed
from replayssm.kernels.gluon.split import prologue, readout
from tests.kernels.gluon.aot import compile_kernel

HEADS = {"gdn": (16, 32), "kda": (32, 32)}
STATE = {4: "fp32", 2: "bf16"}
SHARED_LIMIT = 227 * 1024
# Shared memory and registers together must leave room for this many warps on a multiprocessor. The rows that hold a
# whole tile in registers have 8 and were the fastest of those timed; a compiler that drops them below has regressed.
MIN_WARPS = 8


def constants(kind, p, ring_len=16):
    h, hv = HEADS[kind]
    kda = kind == "kda"
    flags = dict(KDA=kda, BOUNDED=False, L2NORM=True, FORCE=True, DECODE=True, SCAN=p.scan, PDL=p.pdl, EVICT=p.evict)
    sizes = dict(H=h, HV=hv, K=128, V=128, L=ring_len, LP=max(8, 1 << (ring_len - 1).bit_length()))
    strides = dict(a_chan=1, b_head=1, **({} if kda else {"a_head": 1}))
    return dict(**strides, **sizes, **flags, BV=p.rows, CH=p.chunk, NW=p.warps, STAGED=p.staged, FOLD=p.fold)


def distinct(table):
    return sorted({(kind, size, row) for (kind, size), rows in table.items() for _, row in rows}, key=str)


def check(use, warps):
    assert use.spilled_bytes == 0, use
    resident = min(65536 // (use.registers * 32 * warps), SHARED_LIMIT // (use.shared_bytes + 1024))
    assert resident * warps >= MIN_WARPS, use


@pytest.mark.parametrize(("kind", "size", "row"), distinct(launch.REPLAY), ids=str)
def test_replay_rows(kind, size, row):
    row = row.fit(128, 128, size)
    values, options = constants(kind, row), {"maxnreg": row.maxnreg} if row.maxnreg else {}
    kernel = readout if row.two_launches else replay_fused
    check(compile_kernel(kernel, values, STATE[size], "bf16", 90, row.warps, **options), row.warps)
    if row.two_launches:
        values["NW"] = row.prologue_warps
        check(compile_kernel(prologue, values, STATE[size], "bf16", 90, row.prologue_warps), row.prologue_warps)


@pytest.mark.parametrize(("kind", "size", "row"), distinct(launch.PACKED), ids=str)
def test_packed_rows(kind, size, row):
    row = row.fit(128, 128, size)
    check(compile_kernel(packed, constants(kind, row), STATE[size], "bf16", 90, row.warps), row.warps)


@pytest.mark.parametrize("kind", HEADS)
def test_fold(kind):
    row = launch.Launch(launch.FOLD_ROWS, launch.FOLD_ROWS, launch.FOLD_WARPS, staged=False)
    check(compile_kernel(fold_rows, constants(kind, row), "fp32", "bf16", 90, row.warps), row.warps)


def test_blackwell_fp16_state_long_ring():
    row = launch.choose(launch.REPLAY, "kda", 2, 256, 128, 128)
    use = compile_kernel(replay_fused, constants("kda", row, 32), "fp16", "fp16", 100, row.warps)
    assert use.registers <= 255
