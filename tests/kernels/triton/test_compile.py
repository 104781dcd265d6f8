"""Every kernel compiles ahead of time for each kind of GPU, as it is really launched, and spills no register."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
import torch

from replayssm.spec import LayerSpec

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set, so nothing is compiled", allow_module_level=True)

from replayssm.kernels.triton import backend, conv, cursor, fold, launch, packed, replay
from tests.kernels.triton import aot

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HEADS = {"gdn": (16, 32), "kda": (32, 32)}
TARGET = pytest.mark.parametrize("target", aot.TARGETS)
SPARE_BYTES = 16  # outside the table: ptxas spills a register or two to reach the next step of occupancy
ONE_OF_EACH = pytest.mark.parametrize("target", ["sm_90", "gfx942"])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def layer_launches(
    op, kind="gdn", state=F32, rows=256, dims=(128, 128), heads=None, ring_len=16, io=BF16, force=True, layers=0, **gate
):
    """The launches of `op` in {'replay', 'packed', 'fold'} on a layer; dims = (K, V)."""
    h, hv = heads or HEADS[kind]
    spec = LayerSpec(kind, h, hv, *dims, **gate)
    lead = (layers,) if layers else ()

    def empty(array, dtype):
        return torch.empty(lead + array.shape, dtype=dtype)

    ring = spec.ring_arrays(ring_len, 1)
    pools = [empty(spec.state_array(1), state), empty(ring.d, F32), empty(ring.k, io), empty(ring.g, F32)]
    head = (hv, dims[0]) if spec.is_kda else (hv,)
    index = torch.empty(rows, dtype=torch.int32)
    token = [torch.empty(rows, *shape, dtype=io) for shape in ((spec.qkv_dim,), head, (hv,))]
    token += [torch.empty(hv), torch.empty(head), 0.5]
    out = torch.empty(rows, 1, hv, dims[1], dtype=io)
    flags = (True, spec.is_kda, spec.lower_bound, spec.beta_scale)
    with aot.recorded(replay, packed, fold) as launches:
        if op == "replay":
            backend.replay_decode(*token, *pools, out, index, index, index if force else None, *flags)
        elif op == "packed":
            backend.packed_decode(*token, pools[0], out, index, *flags)
        else:
            backend.flush(*pools, index, index, True)
            backend.materialize(*pools, index, index, pools[0], index, True)
    return launches


def table():
    """One batch size for every row of the launch table."""
    for (kind, itemsize), rows in launch.DECODE.items():
        for limit, _ in rows:
            batch = min(limit, 8192) // HEADS[kind][1]
            yield pytest.param(kind, {4: F32, 2: BF16}[itemsize], batch, id=f"{kind}-{itemsize}-{batch}")


@TARGET
@pytest.mark.parametrize(("kind", "state", "rows"), list(table()))
def test_no_row_of_the_launch_table_spills(kind, state, rows, target):
    for op in ("replay", "packed"):
        (one,) = layer_launches(op, kind, state, rows)
        kernel = aot.compiled(one, aot.TARGETS[target])
        used = aot.usage(kernel, aot.TARGETS[target])
        assert used.spilled == 0, f"{op}: {used}"
        assert used.registers <= 255
        assert "tt.dot" not in kernel.asm["ttir"], "a tensor-core product would round its operands"


@TARGET
@pytest.mark.parametrize("kind", HEADS)
def test_fold_does_not_spill(kind, target):
    for state, which in ((F32, 0), (BF16, 1)):  # one as a flush, one as a materialize
        one = layer_launches("fold", kind, state, layers=2)[which]
        used = aot.usage(aot.compiled(one, aot.TARGETS[target]), aot.TARGETS[target])
        assert used.spilled == 0, str(used)


@ONE_OF_EACH
@pytest.mark.parametrize(
    "options",
    [
        {"ring_len": 1},
        {"ring_len": 64, "force": False},
        {"dims": (96, 80), "heads": (3, 9), "io": F16, "state": F16},
        {"dims": (256, 256)},
        {"dims": (1, 1), "heads": (1, 1), "io": F32},
        {"kind": "kda", "dims": (96, 24), "lower_bound": -5.0, "heads": (5, 5)},
        {"kind": "kda", "dims": (256, 256), "ring_len": 32, "state": F16},
    ],
)
def test_other_shapes_and_dtypes_compile(options, target):
    for op in ("replay", "packed", "fold"):
        for one in layer_launches(op, rows=4, **options)[:1]:
            used = aot.usage(aot.compiled(one, aot.TARGETS[target]), aot.TARGETS[target])
            assert used.spilled <= SPARE_BYTES, f"{op}: {used}"


@pytest.mark.parametrize("kind", HEADS)
def test_sizes_and_strides_of_one_compile(kind):
    """They are constants to the compiler, which the other tests do not have in these places."""
    launches = [
        one
        for op in ("replay", "packed", "fold")
        for one in layer_launches(op, kind, rows=1, dims=(1, 1), heads=(1, 1), ring_len=1, layers=int(op == "fold"))
    ]
    with aot.recorded(conv, cursor) as small:
        index = torch.empty(1, dtype=torch.int32)
        backend.advance_cursors(index, index, 16, index, index)
        backend.gather_cursors(index, index)
        backend.force_flush_mask(index, 1, index, index)
        for size in (0, 1):
            x, state, weight = torch.empty(1, 1), torch.empty(1, 1, size), torch.empty(1, size + 1)
            backend.causal_conv_update(x, state, weight, weight[0, :1], index, "silu", torch.empty_like(x))
    assert len(launches + small) == 9
    for one in launches + small:
        aot.compiled(one, aot.TARGETS["sm_90"])


@ONE_OF_EACH
def test_small_kernels_compile(target):
    index, cursors = torch.empty(300, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    with aot.recorded(conv, cursor) as launches:
        backend.advance_cursors(cursors, index, 16, None, None)
        backend.advance_cursors(cursors, index, 16, index, index)
        backend.gather_cursors(cursors, index)
        for lens, interval, slots in ((index, 64, None), (index.long(), 1, index), (index, 1 << 40, index)):
            backend.force_flush_mask(lens, interval, slots, index)
        for width, size, dtype in ((4, 3, BF16), (4, 6, F32), (1, 0, F16), (1, 1, F16)):
            x, state = torch.empty(3, 300, dtype=dtype), torch.empty(2, 300, size, dtype=dtype)
            for windows in (state, state.mT.contiguous().mT):
                weight, out = torch.empty(300, width), torch.empty_like(x)
                backend.causal_conv_update(x, windows, weight, None, index[:3], "silu", out)
    assert len(launches) == 14
    for one in launches:
        assert aot.usage(aot.compiled(one, aot.TARGETS[target]), aot.TARGETS[target]).spilled == 0


def test_state_tiles_put_few_lanes_along_k():
    """Eight lanes along K and four rows: the layout that the tiles are written for, in the compiled program."""
    (one,) = layer_launches("replay")
    text = aot.compiled(one, aot.TARGETS["sm_90"]).asm["ttgir"]
    assert "sizePerThread = [1, 1, 4], threadsPerWarp = [1, 4, 8]" in text


@ONE_OF_EACH
def test_conv_window_is_loaded_whole_before_any_of_it_is_stored(target):
    """It moves in place, and a column may be stored by another thread than the one that loads it."""
    x, state = torch.empty(3, 512, dtype=BF16), torch.empty(2, 512, 3, dtype=F16)
    with aot.recorded(conv) as launches:
        index = torch.empty(3, dtype=torch.int32)
        backend.causal_conv_update(x, state, torch.empty(512, 4), None, index, None, torch.empty_like(x))
    text = aot.compiled(launches[0], aot.TARGETS[target]).asm["ttgir"]
    access = r"tt\.(load|store) [^\n]*tensor<\d+x4x!tt\.ptr<f16>"
    steps = [m[1] or "barrier" for m in re.finditer(rf"{access}|gpu\.barrier|ttg\.barrier", text)]
    assert steps == ["load", "load", "barrier", "store"]
    with aot.recorded(conv) as launches:
        state = state.mT.contiguous().mT
        backend.causal_conv_update(x, state, torch.empty(512, 4), None, index, None, torch.empty_like(x))
    text = aot.compiled(launches[0], aot.TARGETS[target]).asm["ttgir"]
    access = r"tt\.(load|store) [^\n]*tensor<\d+x!tt\.ptr<f16>"
    steps = [m[1] or "barrier" for m in re.finditer(rf"{access}|gpu\.barrier|ttg\.barrier", text)]
    assert "store" in steps
    assert all(steps[i - 1] == "barrier" for i, step in enumerate(steps) if step == "store"), steps


@pytest.mark.parametrize("op", ["replay", "packed", "fold"])
def test_programs_lie_on_the_first_grid_axis(op):
    """The others end at 65535 programs."""
    for one in layer_launches(op, rows=4096, dims=(4, 4), heads=(32, 32)):
        assert len(one.grid) == 1
        assert one.grid[0] >= 4096 * 32


def test_empty_batch_launches_nothing():
    for op in ("replay", "packed", "fold"):
        assert layer_launches(op, rows=0, dims=(4, 4)) == []
