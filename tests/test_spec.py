"""Geometry, memory and traffic of a layer: numbers that can be checked by hand, and refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm import spec
from replayssm.errors import DtypeError, OptionError, ReplayError, RingLengthError, ShapeError

GDN = spec.LayerSpec("gdn", 16, 32, 128, 128)
KDA = spec.LayerSpec("kda", 32, 32, 128, 128)


def test_shapes():
    layer = spec.LayerSpec("gdn", 2, 6, 12, 20)
    assert layer.qkv_dim == 2 * 2 * 12 + 6 * 20
    assert layer.state_array(3) == ((3, 6, 20, 12), "float32")
    assert layer.conv_array(3) == ((3, layer.qkv_dim, 3), "bfloat16")
    d, k, g = layer.ring_arrays(8, 3, "float16")
    assert (d, k, g) == (((3, 6, 8, 20), "float32"), ((3, 2, 8, 12), "float16"), ((3, 6, 8), "float32"))
    assert not layer.is_kda
    kda = spec.LayerSpec("kda", 2, 6, 12, 20)
    assert kda.ring_arrays(8, 3).g == ((3, 6, 8, 12), "float32")
    assert kda.is_kda


def test_bytes_of_a_large_layer():
    assert GDN.state_array().nbytes == 2 * 2**20
    assert GDN.record_bytes() == 32 * 128 * 4 + 16 * 128 * 2 + 32 * 4
    assert KDA.record_bytes() == 32 * 128 * 4 + 32 * 128 * 2 + 32 * 128 * 4
    assert GDN.ring_arrays(16).nbytes == 16 * GDN.record_bytes()


def test_traffic_floor():
    """An fp32 ring of 16 moves 0.57 of packed decode's bytes for GDN."""
    assert spec.packed_traffic(GDN).total == 4 * 2**20
    assert spec.replay_traffic(GDN, 16).total / spec.packed_traffic(GDN).total == pytest.approx(0.57, abs=0.005)
    assert spec.replay_traffic(GDN, 1) == spec.packed_traffic(GDN)


@given(st.sampled_from([GDN, KDA]), st.integers(1, 64), st.sampled_from(spec.STATE_DTYPES))
def test_traffic_is_the_mean_of_a_period(layer, ring_len, dtype):
    size, record = layer.state_array(1, dtype).nbytes, layer.record_bytes()
    read = sum(size + n * record for n in range(ring_len)) / ring_len
    written = ((ring_len - 1) * record + size) / ring_len
    assert spec.replay_traffic(layer, ring_len, dtype) == pytest.approx((read, written))


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        (("mamba", 1, 1, 8, 8), OptionError, "'mamba'"),
        (("gdn", 4, 6, 8, 8), ShapeError, "4 key heads do not divide 6 value heads"),
        (("gdn", 4, 2, 8, 8), ShapeError, "4 key heads"),
        (("gdn", 0, 2, 8, 8), ShapeError, "0 key heads"),
        (("gdn", 2, 4, 257, 8), ShapeError, "257 is outside 1…256"),
        (("kda", 2, 4, 8, 0), ShapeError, "V = 0 is outside 1…256"),
        (("gdn", 2, 4, 8, 8, 4, -5.0), OptionError, "-5.0"),
        (("kda", 2, 4, 8, 8, 4, 0.0), OptionError, "0.0"),
    ],
)
def test_impossible_layers(args, error, said):
    with pytest.raises(error, match=said) as caught:
        spec.LayerSpec(*args)
    assert isinstance(caught.value, ReplayError)


@pytest.mark.parametrize("length", [0, 65, -1, True, 2.0, None])
def test_ring_lengths_out_of_range(length):
    with pytest.raises(RingLengthError, match="1…64"):
        spec.check_ring_len(length)
    with pytest.raises(RingLengthError):
        GDN.ring_arrays(length)


def test_ring_lengths_in_range():
    assert [spec.check_ring_len(n) for n in (1, 16, 64)] == [1, 16, 64]


def test_state_dtypes():
    assert spec.check_state_dtype("float16") == "float16"
    with pytest.raises(DtypeError, match=r"int8.*float32, bfloat16, float16"):
        GDN.state_array(1, "int8")


def test_needs_no_torch():
    code = "import sys, replayssm.spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
