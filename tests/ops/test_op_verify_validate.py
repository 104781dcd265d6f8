"""Wrong arguments of the window operations: refused before anything is written, with both numbers and a remedy."""

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
from tests.step_case import same
from tests.verify_case import empty_out, inputs

B, T = 3, 4


def verify_arguments(kind="gdn"):
    """H=2 HV=6 K=12 V=20 L=8, 5 slots."""
    lay = layer(kind, io=torch.bfloat16)
    pool = Pool(lay, 5, 0.5)
    mixed, a, b = inputs(lay, B, T)
    return {
        "mixed_qkv": mixed, "a": a, "b": b, "A_log": lay.A_log, "dt_bias": lay.dt_bias, "scale": None,
        "initial_state": pool.initial_state, "d_cache": pool.d_cache, "k_cache": pool.k_cache,
        "g_cache": pool.g_cache, "out": empty_out(lay, B, T), "ssm_state_indices": int32(0, 1, 4),
        "write_pos": int32(0, 8, 3), "lengths": int32(4, 0, 1), "force_flush": int32(0, 0, 1), "is_kda": kind == "kda",
    }  # fmt: skip


def packed_arguments(kind="gdn"):
    args = verify_arguments(kind)
    for name in ("d_cache", "k_cache", "g_cache", "write_pos", "force_flush"):
        del args[name]
    return args | {"snapshots": torch.zeros(B, T, 6, 20, 12)}


def replay_arguments(kind="gdn"):
    args = packed_arguments(kind)
    for name in ("scale", "out", "lengths", "snapshots"):
        del args[name]
    return args | {"accepted": int32(4, 0, 1)}


def fold_arguments(kind="gdn"):
    args = verify_arguments(kind)
    keep = ("initial_state", "d_cache", "k_cache", "g_cache", "ssm_state_indices")
    return {name: args[name] for name in keep} | {"accepted": int32(4, 0, 8)}


def conv_arguments(kind="gdn"):
    return {
        "x": torch.randn(B, T, 10), "conv_state": torch.zeros(5, 10, 3), "weight": torch.randn(10, 4),
        "bias": torch.zeros(10), "ssm_state_indices": int32(0, 1, 4), "lengths": int32(4, 0, 1),
    }  # fmt: skip


def commit_conv_arguments(kind="gdn"):
    args = conv_arguments()
    return {
        "conv_state": args["conv_state"], "window": args["x"], "ssm_state_indices": args["ssm_state_indices"],
        "accepted": int32(4, 0, 1),
    }  # fmt: skip


def snapshot_arguments(kind="gdn"):
    return {
        "initial_state": torch.zeros(2, 5, 6, 20, 12), "snapshots": torch.ones(2, B, T, 6, 20, 12),
        "ssm_state_indices": int32(0, 1, 4), "accepted": int32(4, 0, 1),
    }  # fmt: skip


def cursor_arguments(kind="gdn"):
    return {
        "cursor": int32(0, 8, 0, 0, 3), "ssm_state_indices": int32(0, 1, 4), "ring_len": 8,
        "lengths": int32(4, 0, 1), "accepted": int32(4, 0, 1), "force_flush": None,
    }  # fmt: skip


OPS = {
    "verify": (ops.fused_recurrent_linear_replayssm_verify, verify_arguments),
    "packed": (ops.fused_recurrent_linear_packed_verify, packed_arguments),
    "replay": (ops.commit_kv_replay, replay_arguments),
    "fold": (ops.commit_fold, fold_arguments),
    "snapshot": (ops.commit_snapshot, snapshot_arguments),
    "cursors": (ops.commit_cursors, cursor_arguments),
    "conv": (ops.causal_conv_verify, conv_arguments),
    "commit_conv": (ops.commit_conv, commit_conv_arguments),
}


def bad(op, name, change, error, *said, kind="gdn"):
    return pytest.param(op, name, change, error, said, kind, id=f"{op}-{name}-{error.__name__}-{'-'.join(said)}")


def short_ring(x):
    return x[:, :, :3]


WRONG = [
    # the window and the ring
    bad("verify", "d_cache", short_ring, ShapeError, "[5, 2, 8, 12]", "[5, 2, 3, 12]"),
    bad("verify", "mixed_qkv", lambda x: x[:, 0], ShapeError, "2 axes", "B, T, 2·H·K + HV·V"),
    bad("verify", "mixed_qkv", lambda x: x[:, :0], ShapeError, "T = 0", "1…64"),
    bad("verify", "mixed_qkv", lambda x: x[..., :-1], ShapeError, "167", "HV = 6", "V = 20", "K = 12"),
    bad("verify", "mixed_qkv", lambda x: x.float(), DtypeError, "k_cache", "bfloat16", "float32", "io_dtype"),
    bad("verify", "mixed_qkv", lambda x: x.double(), DtypeError, "float64"),
    bad("verify", "mixed_qkv", lambda x: x.mT.contiguous().mT, LayoutError, "contiguous"),
    bad("verify", "a", lambda x: x[:, :3], ShapeError, "[3, 3, 6]", "[3, 4, 6]"),
    bad("verify", "a", lambda x: x[..., 0], ShapeError, "[3, 4, 6]", "[3, 4, 6, 12]", "is_kda=True", kind="kda"),
    bad("verify", "b", lambda x: x[0], ShapeError, "[4, 6]", "[3, 4, 6]"),
    bad("verify", "A_log", lambda x: x[:3], ShapeError, "[3]", "[6]"),
    bad("verify", "dt_bias", lambda x: x.double(), DtypeError, "float64"),
    bad("verify", "initial_state", lambda x: x[0], ShapeError, "3 axes", "slots, HV, V, K"),
    bad("verify", "initial_state", lambda x: torch.zeros(5, 6, 20, 257), ShapeError, "257", "256"),
    bad("verify", "out", lambda x: x[:, :1], ShapeError, "[3, 1, 6, 20]", "[3, 4, 6, 20]"),
    bad("verify", "out", lambda x: x.mT.contiguous().mT, LayoutError, "axis 3"),
    bad("verify", "lengths", lambda x: x[:2], ShapeError, "[2]", "[3]"),
    bad("verify", "lengths", lambda x: x.long(), DtypeError, "int64", "int32"),
    bad("verify", "lengths", lambda x: int32(4, 5, 1), SlotError, "5 (slot 1)", "T = 4", "0…4"),
    bad("verify", "lengths", lambda x: int32(4, -1, 1), SlotError, "-1 (slot 1)"),
    bad("verify", "write_pos", lambda x: int32(9, 0, 1), SlotError, "9 (slot 0)", "0…8"),
    bad("verify", "write_pos", lambda x: x[0], ShapeError, "[3]"),
    bad("verify", "force_flush", lambda x: x.repeat(2), ShapeError, "[6]", "[3]"),
    bad("verify", "ssm_state_indices", lambda x: int32(0, 1, 5), SlotError, "[5]", "0…4"),
    bad("verify", "ssm_state_indices", lambda x: x[:2], ShapeError, "[2]", "[3]"),
    bad("verify", "lengths", lambda x: x.to("meta"), DeviceError, "lengths", "meta"),
    bad("verify", "out", lambda x: x.to("meta"), DeviceError, "out", "meta"),
    bad("verify", "scale", lambda x: float("nan"), OptionError, "nan"),
    # without a ring
    bad("packed", "snapshots", lambda x: x[:, :3], ShapeError, "[3, 3, 6, 20, 12]", "[3, 4, 6, 20, 12]"),
    bad("packed", "snapshots", lambda x: x.bfloat16(), DtypeError, "bfloat16", "float32"),
    bad("packed", "snapshots", lambda x: x.mT.contiguous().mT, LayoutError, "snapshots"),
    bad("packed", "lengths", lambda x: int32(7, 1, 1), SlotError, "7 (slot 0)", "T = 4"),
    bad("replay", "accepted", lambda x: int32(0, 5, 0), SlotError, "5 (slot 1)", "T = 4"),
    bad("replay", "accepted", lambda x: x[:1], ShapeError, "[1]", "[3]"),
    bad("replay", "initial_state", lambda x: x[None], ShapeError, "layers", "3 axes"),
    bad("replay", "ssm_state_indices", lambda x: int32(9, 1, 0), SlotError, "[9]"),
    bad("fold", "accepted", lambda x: int32(0, 9, 0), SlotError, "9 (slot 1)", "0…8"),
    bad("fold", "accepted", lambda x: x[:2], ShapeError, "[2]", "[3]"),
    bad("fold", "accepted", lambda x: x.long(), DtypeError, "int64"),
    bad("snapshot", "snapshots", lambda x: x[..., :11], ShapeError, "[2, 3, 4, 6, 20, 11]", "[2, 3, 4, 6, 20, 12]"),
    bad("snapshot", "snapshots", lambda x: x[0], ShapeError, "5 axes", "layers"),
    bad("snapshot", "snapshots", lambda x: x.half(), DtypeError, "float16", "float32"),
    bad("snapshot", "accepted", lambda x: int32(5, 0, 0), SlotError, "5 (slot 0)", "T = 4"),
    # conv and cursors
    bad("conv", "x", lambda x: x[0], ShapeError, "2 axes", "B, T, C"),
    bad("conv", "x", lambda x: x[..., :9], ShapeError, "[5, 10, 3]", "[5, 9, 3]"),
    bad("conv", "x", lambda x: x.double(), DtypeError, "float64"),
    bad("conv", "weight", lambda x: torch.zeros(10, 5), ShapeError, "3 columns", "width 5", "4"),
    bad("conv", "bias", lambda x: x[:9], ShapeError, "[9]", "[10]"),
    bad("conv", "lengths", lambda x: int32(0, 0, 5), SlotError, "5 (slot 4)", "T = 4"),
    bad("conv", "conv_state", lambda x: torch.zeros(5, 10, 6)[..., ::2], LayoutError, "conv_state"),
    bad("commit_conv", "accepted", lambda x: int32(0, 0, 5), SlotError, "5 (slot 4)", "T = 4"),
    bad("commit_conv", "window", lambda x: x[None], ShapeError, "4 axes"),
    bad("commit_conv", "window", lambda x: x[:, :0], ShapeError, "T = 0"),
    bad("cursors", "ring_len", lambda x: 65, RingLengthError, "65", "64"),
    bad("cursors", "cursor", lambda x: x.long(), DtypeError, "int64"),
    bad("cursors", "accepted", lambda x: int32(4, 1, 1), SlotError, "1 of 0 (slot 1)"),
    bad("cursors", "accepted", lambda x: int32(-1, 0, 1), SlotError, "-1 of 4 (slot 0)"),
    bad("cursors", "lengths", lambda x: int32(9, 0, 1), SlotError, "9 (slot 0)", "L = 8"),
    bad("cursors", "lengths", lambda x: x[:1], ShapeError, "[1]", "[3]"),
    bad("cursors", "ssm_state_indices", lambda x: int32(0, 1, 5), SlotError, "[5]"),
]


@pytest.mark.parametrize(("op", "name", "change", "error", "said", "kind"), WRONG)
def test_refused(op, name, change, error, said, kind):
    call, make = OPS[op]
    args = make(kind)
    args[name] = change(args[name])
    before = {n: x.clone() for n, x in args.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error) as caught:
        call(**args)
    assert isinstance(caught.value, ReplayError)
    for text in said:
        assert text in str(caught.value), str(caught.value)
    for n, old in before.items():
        assert old.is_meta or args[n].dtype.is_floating_point is False or same_or_float64(args[n], old), n


def same_or_float64(x, y):
    return torch.equal(x, y) if x.dtype == torch.float64 else same(x, y)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_accepted_as_they_are(op, kind):
    call, make = OPS[op]
    call(**make(kind))


def test_a_window_longer_than_the_ring_names_both_and_what_to_do():
    args = verify_arguments()
    args |= {name: args[name][:, :, :3].contiguous() for name in ("d_cache", "k_cache", "g_cache")}
    args["write_pos"] = int32(0, 1, 2)
    with pytest.raises(ShapeError, match=r"T = 4 tokens does not fit a ring of length 3.*ring_len=5.*at most 2"):
        ops.fused_recurrent_linear_replayssm_verify(**args)


def test_conv_output_must_not_be_the_input():
    args = conv_arguments()
    with pytest.raises(OptionError, match="out is x itself"):
        ops.causal_conv_verify(**args, out=args["x"])
