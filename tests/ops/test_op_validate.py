"""Every wrong argument is refused before anything is written, with both numbers and a remedy in the message."""

from __future__ import annotations

import pytest
import torch

from replayssm import ops
from replayssm.errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ReplayError,
    RingLengthError,
    ShapeError,
    SlotError,
)
from tests.decode_case import Pool, int32, layer
from tests.ops.test_op_isolation import same

B = 3


def arguments(kind="gdn"):
    """Valid arguments of the replay decode: H=2 HV=6 K=12 V=20 L=8, 5 slots."""
    lay = layer(kind, io=torch.bfloat16)
    pool = Pool(lay, 5, 0.5)
    mixed, a, b = lay.tokens(1, B)[0]
    return {
        "mixed_qkv": mixed,
        "a": a,
        "b": b,
        "A_log": lay.A_log,
        "dt_bias": lay.dt_bias,
        "scale": None,
        "initial_state": pool.initial_state,
        "d_cache": pool.d_cache,
        "k_cache": pool.k_cache,
        "g_cache": pool.g_cache,
        "out": lay.empty_out(B),
        "ssm_state_indices": int32(0, 1, 4),
        "write_pos": int32(0, 7, 3),
        "force_flush": int32(0, 0, 1),
        "is_kda": kind == "kda",
    }


def bad(name, change, error, *said, kind="gdn"):
    return pytest.param(name, change, error, said, kind, id=f"{name}-{error.__name__}-{'-'.join(said)}")


WRONG = [
    # sizes
    bad("mixed_qkv", lambda x: x[:, :-1], ShapeError, "167", "HV = 6", "V = 20", "K = 12"),
    bad("mixed_qkv", lambda x: torch.cat([x] * 2, 1)[:, : 120 + 2 * 4 * 12], ShapeError, "216", "divisor of 6"),
    bad("mixed_qkv", lambda x: x[:, :120], ShapeError, "120"),
    bad("mixed_qkv", lambda x: x[:, None], ShapeError, "3 axes", "2·H·K + HV·V"),
    bad("a", lambda x: x[:2], ShapeError, "[2, 6]", "[3, 6]"),
    bad("a", lambda x: x[..., None].expand(3, 6, 12), ShapeError, "[3, 6, 12]", "is_kda=False"),
    bad("a", lambda x: x[..., 0], ShapeError, "[3, 6]", "[3, 6, 12]", "is_kda=True", kind="kda"),
    bad("b", lambda x: x[:, :5], ShapeError, "[3, 5]", "[3, 6]"),
    bad("A_log", lambda x: x[:3], ShapeError, "[3]", "[6]"),
    bad("dt_bias", lambda x: x.repeat(2), ShapeError, "[12]", "[6]"),
    bad("dt_bias", lambda x: x.flatten(), ShapeError, "[72]", "[6, 12]", kind="kda"),
    bad("initial_state", lambda x: x[0], ShapeError, "3 axes", "slots, HV, V, K"),
    bad("initial_state", lambda x: x.mT.contiguous(), ShapeError),
    bad("initial_state", lambda x: torch.zeros(5, 6, 20, 257), ShapeError, "257", "256"),
    bad("initial_state", lambda x: torch.zeros(4, 6, 20, 12), ShapeError, "[5, 6, 8, 20]", "[4, 6, 8, 20]"),
    bad("d_cache", lambda x: x.mT.contiguous(), ShapeError, "[5, 6, 20, 8]"),
    bad("d_cache", lambda x: x[:, :, :0], RingLengthError, "0", "64"),
    bad("d_cache", lambda x: torch.zeros(5, 6, 65, 20), RingLengthError, "65", "64"),
    bad("k_cache", lambda x: x[:, :1], ShapeError, "[5, 1, 8, 12]", "[5, 2, 8, 12]"),
    bad("k_cache", lambda x: x[:, :, :7], ShapeError, "[5, 2, 7, 12]", "[5, 2, 8, 12]"),
    bad("g_cache", lambda x: x[..., None], ShapeError, "[5, 6, 8, 1]", "[5, 6, 8]"),
    bad("out", lambda x: x[:, 0], ShapeError, "[3, 6, 20]", "[3, 1, 6, 20]"),
    bad("ssm_state_indices", lambda x: x[:2], ShapeError, "[2]", "[3]"),
    bad("write_pos", lambda x: x[:1], ShapeError, "[1]", "[3]"),
    bad("write_pos", lambda x: x[0], ShapeError, "[3]"),
    bad("force_flush", lambda x: x.repeat(2), ShapeError, "[6]", "[3]"),
    # dtypes
    bad("mixed_qkv", lambda x: x.double(), DtypeError, "float64", "float32"),
    bad("mixed_qkv", lambda x: x.float(), DtypeError, "k_cache", "bfloat16", "float32", "io_dtype"),
    bad("a", lambda x: x.int(), DtypeError, "int32"),
    bad("b", lambda x: x.double(), DtypeError, "float64"),
    bad("A_log", lambda x: x.double(), DtypeError, "float64"),
    bad("initial_state", lambda x: x.double(), DtypeError, "float64"),
    bad("d_cache", lambda x: x.bfloat16(), DtypeError, "bfloat16", "float32"),
    bad("g_cache", lambda x: x.half(), DtypeError, "float16", "float32"),
    bad("k_cache", lambda x: x.float(), DtypeError, "float32", "bfloat16"),
    bad("out", lambda x: x.double(), DtypeError, "float64"),
    bad("ssm_state_indices", lambda x: x.long(), DtypeError, "int64", "int32", ".to("),
    bad("write_pos", lambda x: x.long(), DtypeError, "int64", "int32"),
    bad("force_flush", lambda x: x.bool(), DtypeError, "bool", "int32"),
    # devices and strides
    bad("mixed_qkv", lambda x: x.to("meta"), DeviceError, "meta", "cpu"),
    bad("write_pos", lambda x: x.to("meta"), DeviceError, "meta", "cpu"),
    bad("k_cache", lambda x: x.to("meta"), DeviceError, "meta", "cpu"),
    bad("mixed_qkv", lambda x: x.t().contiguous().t(), LayoutError, "3", "1", "contiguous"),
    bad("initial_state", lambda x: x.mT.contiguous().mT, LayoutError, "20", "1"),
    bad("initial_state", lambda x: torch.zeros(5, 12, 20, 12)[:, ::2], LayoutError, "480", "240"),
    bad("initial_state", lambda x: x[:1].expand(5, 6, 20, 12), LayoutError, "overlap"),
    bad("d_cache", lambda x: torch.zeros(5, 6, 16, 20)[:, :, ::2], LayoutError, "40", "20"),
    bad("out", lambda x: x.mT.contiguous().mT, LayoutError),
    # options
    bad("scale", lambda x: 12, OptionError, "12", "float"),
    bad("scale", lambda x: float("nan"), OptionError, "nan"),
    bad("lower_bound", lambda x: -5.0, OptionError, "-5.0", "is_kda"),
    bad("lower_bound", lambda x: 0.0, OptionError, "0.0", "< 0", kind="kda"),
    bad("beta_scale", lambda x: 0.0, OptionError, "0.0", "> 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "said", "kind"), WRONG)
def test_decode_refuses(name, change, error, said, kind):
    args = arguments(kind)
    args[name] = change(args.get(name))
    tensors = {k: v for k, v in args.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
    before = [t.clone() for t in tensors.values() if t.dtype != torch.float64 and t.element_size() in (2, 4)]
    with pytest.raises(error) as caught:
        ops.fused_recurrent_linear_replayssm_decode(**args)
    for text in said:
        assert text in str(caught.value)
    after = [t for t in tensors.values() if t.dtype != torch.float64 and t.element_size() in (2, 4)]
    assert same(before, after)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [(p.values[0], p.values[1], p.values[2]) for p in WRONG if p.values[4] == "gdn" and p.values[0] in (
        "mixed_qkv", "a", "b", "A_log", "dt_bias", "out", "ssm_state_indices", "scale"
    ) and "k_cache" not in p.values[3]],
)  # fmt: skip
def test_packed_decode_refuses_the_same(name, change, error):
    args = arguments()
    args[name] = change(args[name])
    for ring in ("d_cache", "k_cache", "g_cache", "write_pos", "force_flush"):
        del args[ring]
    with pytest.raises(error):
        ops.fused_recurrent_linear_packed_decode(**args)


def test_errors_are_also_what_python_users_expect():
    assert issubclass(ShapeError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(SlotError, IndexError)
    for error in (ShapeError, DtypeError, DeviceError, LayoutError, SlotError, RingLengthError, OptionError):
        assert issubclass(error, ReplayError)


def ring_arguments():
    args = arguments("kda")
    names = ("initial_state", "d_cache", "k_cache", "g_cache")
    return [args[n] for n in names]


@pytest.mark.parametrize(
    ("at", "change", "error"),
    [
        (0, lambda x: x[None], ShapeError),
        (0, lambda x: x.double(), DtypeError),
        (1, lambda x: x[:4], ShapeError),
        (1, lambda x: x.half(), DtypeError),
        (2, lambda x: x.repeat(1, 2, 1, 1), ShapeError),
        (3, lambda x: x[..., 0, 0], ShapeError),
        (3, lambda x: x[..., :5], ShapeError),
        (4, lambda x: x.long(), DtypeError),
        (4, lambda x: x[None], ShapeError),
        (5, lambda x: x[:2], ShapeError),
        (5, lambda x: x.to("meta"), DeviceError),
    ],
)
def test_flush_refuses(at, change, error):
    args = [*ring_arguments(), int32(0, 1, 2), int32(1, 2, 3)]
    args[at] = change(args[at])
    with pytest.raises(error):
        ops.flush(*args)


@pytest.mark.parametrize(
    ("dst", "index", "error"),
    [
        (lambda x: x[:, :3], int32(0, 1), ShapeError),
        (lambda x: x[None], int32(0, 1), ShapeError),
        (lambda x: x.double(), int32(0, 1), DtypeError),
        (lambda x: x.mT.contiguous().mT, int32(0, 1), LayoutError),
        (lambda x: x, int32(0), ShapeError),
        (lambda x: x, int32(0, 1).long(), DtypeError),
    ],
)
def test_materialize_refuses(dst, index, error):
    args = ring_arguments()
    with pytest.raises(error):
        ops.materialize(*args, int32(2, 3), int32(1, 2), dst(args[0].clone()), index)


def test_cursor_ops_refuse():
    cursor, slots = torch.zeros(4, dtype=torch.int32), int32(0, 1)
    for call, error in (
        (lambda: ops.advance_cursors(cursor.long(), slots, 8), DtypeError),
        (lambda: ops.advance_cursors(cursor[None], slots, 8), ShapeError),
        (lambda: ops.advance_cursors(cursor, slots.long(), 8), DtypeError),
        (lambda: ops.advance_cursors(cursor, slots, 0), RingLengthError),
        (lambda: ops.advance_cursors(cursor, slots, 8, int32(1)), ShapeError),
        (lambda: ops.advance_cursors(cursor, slots, 8, None, slots.long()), DtypeError),
        (lambda: ops.advance_cursors(cursor, slots.to("meta"), 8), DeviceError),
        (lambda: ops.gather_cursors(cursor, slots[None]), ShapeError),
        (lambda: ops.force_flush_mask(slots[None], 8), ShapeError),
        (lambda: ops.force_flush_mask(slots.float(), 8), DtypeError),
        (lambda: ops.force_flush_mask(slots, 8.0), OptionError),
        (lambda: ops.force_flush_mask(slots, True), OptionError),
        (lambda: ops.force_flush_mask(slots, 8, int32(1)), ShapeError),
        (lambda: ops.force_flush_mask(slots, 8, slots.long()), DtypeError),
        (lambda: ops.force_flush_mask(slots, 8, None, slots.bool()), DtypeError),
        (lambda: ops.force_flush_mask(slots, 8, None, slots.to("meta")), DeviceError),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("x", lambda x: x[:, :6], ShapeError),
        ("x", lambda x: x.double(), DtypeError),
        ("conv_state", lambda x: x[:, :, 1:].contiguous(), ShapeError),
        ("conv_state", lambda x: x.repeat(1, 1, 2)[:, :, ::2], LayoutError),
        ("conv_state", lambda x: x.mT.repeat(1, 1, 2)[:, :, ::2].mT, LayoutError),
        ("weight", lambda x: x[:, None], ShapeError),
        ("weight", lambda x: x[:, :0], ShapeError),
        ("bias", lambda x: x[:3], ShapeError),
        ("ssm_state_indices", lambda x: x.long(), DtypeError),
        ("out", lambda x: x.T, ShapeError),
        ("activation", lambda x: "gelu", OptionError),
        ("bias", lambda x: x.to("meta"), DeviceError),
    ],
)
def test_conv_refuses(name, change, error):
    args = {
        "x": torch.zeros(2, 7),
        "conv_state": torch.zeros(3, 7, 3),
        "weight": torch.zeros(7, 4),
        "bias": torch.zeros(7),
        "ssm_state_indices": int32(0, 1),
        "activation": "silu",
        "out": torch.zeros(2, 7),
    }
    ops.causal_conv_update(**args)
    args[name] = change(args[name])
    with pytest.raises(error):
        ops.causal_conv_update(**args)


@pytest.fixture
def debug():
    before = ops.debug_checks(True)
    yield
    ops.debug_checks(before)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ssm_state_indices", int32(0, 5, 1), ("[5]", "0…4", "5 (")),
        ("ssm_state_indices", int32(3, 1, 3), ("[3]", "more than once")),
        ("write_pos", int32(0, 8, 1), ("8 (slot 1)", "0…7")),
        ("write_pos", int32(-1, 0, 1), ("-1 (slot 0)", "0…7")),
    ],
)
def test_debug_checks_of_decode(name, value, said):
    args = arguments()
    before = args["initial_state"].clone()
    args[name] = value
    with pytest.raises(SlotError) as caught:
        ops.fused_recurrent_linear_replayssm_decode(**args)
    for text in said:
        assert text in str(caught.value)
    assert torch.equal(args["initial_state"], before)


@pytest.mark.usefixtures("debug")
def test_debug_checks_of_the_other_ops():
    pools = ring_arguments()
    slots, pos = int32(0, 1), int32(8, 1)
    ops.flush(*pools, slots, pos)  # a full ring may be flushed
    ops.materialize(*pools, int32(0, 0), int32(1, 1), pools[0], int32(2, 3))  # one source, two copies
    args = arguments()
    args["ssm_state_indices"] = int32(-1, -1, 2)  # padding may repeat
    args["write_pos"] = int32(99, -5, 0)  # and its cursor is not looked at
    ops.fused_recurrent_linear_replayssm_decode(**args)
    for call, said in (
        (lambda: ops.flush(*pools, slots, int32(9, 1)), "9 (slot 0)"),
        (lambda: ops.flush(*pools, int32(1, 1), pos), "more than once"),
        (lambda: ops.materialize(*pools, int32(1, 2), pos, pools[0], int32(2, 3)), "[2]"),
        (lambda: ops.materialize(*pools, int32(1, 7), pos, pools[0], int32(2, 3)), "[7]"),
        (lambda: ops.materialize(*pools, int32(0, 1), pos, pools[0], int32(3, 3)), "more than once"),
        (lambda: ops.advance_cursors(torch.zeros(2, dtype=torch.int32), int32(0, 2), 8), "[2]"),
        (lambda: ops.gather_cursors(torch.zeros(2, dtype=torch.int32), int32(2)), "[2]"),
    ):
        with pytest.raises(SlotError) as caught:
            call()
        assert said in str(caught.value)


def test_debug_checks_are_off_by_default_and_return_what_was_set():
    assert ops.debug_checks(True) is False
    assert ops.debug_checks(False) is True
