"""The registered operations (namespace `replayssm`): what torch.compile and CUDA graphs see.

Every mutated tensor is named in the schema and nothing is returned that aliases an input. An implementation runs
the value checks and the traffic count where these are due, then the backend of the device. The public
functions beside this module validate first; call those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from replayssm.kernels.choose import backend
from replayssm.ops import debug, traffic

_LIB = torch.library.Library("replayssm", "DEF")

_INPUTS = "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, float scale, "
_FLAGS = "bool use_qk_l2norm_in_kernel, bool is_kda, float? lower_bound, float beta_scale"


def _plain(impl: Callable[..., Any]) -> Callable[..., Any]:
    """Run without autograd and autocast, which a kernel written in Python would otherwise meet inside."""

    @wraps(impl)
    def run(*args: Any) -> Any:
        device = args[0].device.type
        with torch.no_grad():
            if not torch.is_autocast_enabled(device):
                return impl(*args)
            with torch.autocast(device, enabled=False):
                return impl(*args)

    return run


def _register(schema: str, impl: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    name = schema.partition("(")[0]
    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIB.impl(name, _plain(impl), key)
    torch.library.register_fake(f"replayssm::{name}", fake or (lambda *args, **kwargs: None), lib=_LIB)


def _replay_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, out: Tensor, ssm_state_indices: Tensor, write_pos: Tensor,
    force_flush: Tensor | None, use_qk_l2norm_in_kernel: bool, is_kda: bool, lower_bound: float | None,
    beta_scale: float,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[0])
    debug.check_write_pos(write_pos, ssm_state_indices, d_cache.shape[2])
    if traffic.active():
        traffic.note_replay(initial_state, (d_cache, k_cache, g_cache), ssm_state_indices, write_pos, force_flush)
    backend(initial_state.device.type).replay_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, force_flush, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def _packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool, is_kda: bool, lower_bound: float | None,
    beta_scale: float,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[0])
    if traffic.active():
        traffic.note_packed(initial_state, ssm_state_indices)
    backend(initial_state.device.type).packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel,
        is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def _flush(
    initial_state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, ssm_state_indices: Tensor,
    write_pos: Tensor, use_qk_l2norm_in_kernel: bool,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[-4])
    debug.check_write_pos(write_pos, ssm_state_indices, d_cache.shape[-2], full=True)
    if traffic.active():
        traffic.note_flush(initial_state, (d_cache, k_cache, g_cache), ssm_state_indices, write_pos)
    backend(initial_state.device.type).flush(
        initial_state, d_cache, k_cache, g_cache, ssm_state_indices, write_pos, use_qk_l2norm_in_kernel
    )


def _materialize(
    initial_state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, src_indices: Tensor, write_pos: Tensor,
    dst_state: Tensor, dst_indices: Tensor, use_qk_l2norm_in_kernel: bool,
) -> None:  # fmt: skip
    debug.check_slots("src_indices", src_indices, initial_state.shape[-4], distinct=False)
    debug.check_slots("dst_indices", dst_indices, dst_state.shape[-4])
    debug.check_write_pos(write_pos, src_indices, d_cache.shape[-2], full=True)
    if dst_state.data_ptr() == initial_state.data_ptr():
        debug.check_disjoint(src_indices, dst_indices)
    if traffic.active():
        traffic.note_materialize(
            initial_state, (d_cache, k_cache, g_cache), src_indices, write_pos, dst_state, dst_indices
        )
    backend(initial_state.device.type).materialize(
        initial_state, d_cache, k_cache, g_cache, src_indices, write_pos, dst_state, dst_indices,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip


def _advance_cursors(
    cursor: Tensor, ssm_state_indices: Tensor, ring_len: int, force_flush: Tensor | None, num_tokens: Tensor | None
) -> None:
    debug.check_slots("ssm_state_indices", ssm_state_indices, cursor.shape[0])
    backend(cursor.device.type).advance_cursors(cursor, ssm_state_indices, ring_len, force_flush, num_tokens)


def _gather_cursors(cursor: Tensor, ssm_state_indices: Tensor) -> Tensor:
    debug.check_slots("ssm_state_indices", ssm_state_indices, cursor.shape[0])
    return backend(cursor.device.type).gather_cursors(cursor, ssm_state_indices)


def _force_flush_mask(seq_lens: Tensor, interval: int, ssm_state_indices: Tensor | None, out: Tensor) -> None:
    backend(out.device.type).force_flush_mask(seq_lens, interval, ssm_state_indices, out)


def _causal_conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, ssm_state_indices: Tensor,
    activation: str | None, out: Tensor,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, conv_state.shape[0])
    backend(x.device.type).causal_conv_update(x, conv_state, weight, bias, ssm_state_indices, activation, out)


def _replay_verify(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, out: Tensor, ssm_state_indices: Tensor, write_pos: Tensor,
    lengths: Tensor, force_flush: Tensor | None, use_qk_l2norm_in_kernel: bool, is_kda: bool,
    lower_bound: float | None, beta_scale: float,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[0])
    debug.check_write_pos(write_pos, ssm_state_indices, d_cache.shape[2], full=True)
    debug.check_counts("lengths", lengths, ssm_state_indices, mixed_qkv.shape[1], "T")
    if traffic.active():
        ring = d_cache, k_cache, g_cache
        traffic.note_verify(initial_state, ring, ssm_state_indices, write_pos, lengths, force_flush)
    backend(initial_state.device.type).replay_verify(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, lengths, force_flush, use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def _packed_verify(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    snapshots: Tensor | None, out: Tensor, ssm_state_indices: Tensor, lengths: Tensor, use_qk_l2norm_in_kernel: bool,
    is_kda: bool, lower_bound: float | None, beta_scale: float,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[0])
    debug.check_counts("lengths", lengths, ssm_state_indices, mixed_qkv.shape[1], "T")
    if traffic.active():
        traffic.note_packed_verify(initial_state, ssm_state_indices, None if snapshots is None else lengths)
    backend(initial_state.device.type).packed_verify(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, snapshots, out, ssm_state_indices, lengths,
        use_qk_l2norm_in_kernel, is_kda, lower_bound, beta_scale,
    )  # fmt: skip


def _causal_conv_verify(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, ssm_state_indices: Tensor, lengths: Tensor,
    activation: str | None, out: Tensor,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, conv_state.shape[0])
    debug.check_counts("lengths", lengths, ssm_state_indices, x.shape[1], "T")
    backend(x.device.type).causal_conv_verify(x, conv_state, weight, bias, ssm_state_indices, lengths, activation, out)


def _commit_cursors(
    cursor: Tensor, ssm_state_indices: Tensor, ring_len: int, lengths: Tensor, accepted: Tensor,
    force_flush: Tensor | None,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, cursor.shape[0])
    debug.check_counts("lengths", lengths, ssm_state_indices, ring_len, "L")
    debug.check_accepted(accepted, ssm_state_indices, lengths)
    backend(cursor.device.type).commit_cursors(cursor, ssm_state_indices, ring_len, lengths, accepted, force_flush)


def _commit_conv(conv_state: Tensor, window: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    debug.check_slots("ssm_state_indices", ssm_state_indices, conv_state.shape[-3])
    debug.check_counts("accepted", accepted, ssm_state_indices, window.shape[-2], "T")
    backend(window.device.type).commit_conv(conv_state, window, ssm_state_indices, accepted)


def _commit_snapshot(initial_state: Tensor, snapshots: Tensor, ssm_state_indices: Tensor, accepted: Tensor) -> None:
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[-4])
    debug.check_counts("accepted", accepted, ssm_state_indices, snapshots.shape[-4], "T")
    if traffic.active():
        traffic.note_commit(initial_state, ssm_state_indices, accepted)
    backend(initial_state.device.type).commit_snapshot(initial_state, snapshots, ssm_state_indices, accepted)


def _commit_kv_replay(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, initial_state: Tensor,
    ssm_state_indices: Tensor, accepted: Tensor, use_qk_l2norm_in_kernel: bool, is_kda: bool,
    lower_bound: float | None, beta_scale: float,
) -> None:  # fmt: skip
    debug.check_slots("ssm_state_indices", ssm_state_indices, initial_state.shape[-4])
    debug.check_counts("accepted", accepted, ssm_state_indices, mixed_qkv.shape[-2], "T")
    if traffic.active():
        traffic.note_commit(initial_state, ssm_state_indices, accepted)
    backend(initial_state.device.type).commit_kv_replay(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, accepted, use_qk_l2norm_in_kernel, is_kda,
        lower_bound, beta_scale,
    )  # fmt: skip


_register(
    f"replay_decode({_INPUTS}Tensor(a!) initial_state, Tensor(b!) d_cache, Tensor(c!) k_cache, Tensor(d!) g_cache, "
    f"Tensor(e!) out, Tensor ssm_state_indices, Tensor write_pos, Tensor? force_flush, {_FLAGS}) -> ()",
    _replay_decode,
)
_register(
    f"packed_decode({_INPUTS}Tensor(a!) initial_state, Tensor(b!) out, Tensor ssm_state_indices, {_FLAGS}) -> ()",
    _packed_decode,
)
_register(
    "flush(Tensor(a!) initial_state, Tensor d_cache, Tensor k_cache, Tensor g_cache, Tensor ssm_state_indices, "
    "Tensor write_pos, bool use_qk_l2norm_in_kernel) -> ()",
    _flush,
)
_register(
    "materialize(Tensor initial_state, Tensor d_cache, Tensor k_cache, Tensor g_cache, Tensor src_indices, "
    "Tensor write_pos, Tensor(a!) dst_state, Tensor dst_indices, bool use_qk_l2norm_in_kernel) -> ()",
    _materialize,
)
_register(
    "advance_cursors(Tensor(a!) cursor, Tensor ssm_state_indices, int ring_len, Tensor? force_flush, "
    "Tensor? num_tokens) -> ()",
    _advance_cursors,
)
_register(
    "gather_cursors(Tensor cursor, Tensor ssm_state_indices) -> Tensor",
    _gather_cursors,
    lambda cursor, ssm_state_indices: torch.empty_like(ssm_state_indices),
)
_register(
    "force_flush_mask(Tensor seq_lens, int interval, Tensor? ssm_state_indices, Tensor(a!) out) -> ()",
    _force_flush_mask,
)
_register(
    "causal_conv_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor ssm_state_indices, "
    "str? activation, Tensor(b!) out) -> ()",
    _causal_conv_update,
)
_register(
    f"replay_verify({_INPUTS}Tensor(a!) initial_state, Tensor(b!) d_cache, Tensor(c!) k_cache, Tensor(d!) g_cache, "
    f"Tensor(e!) out, Tensor ssm_state_indices, Tensor write_pos, Tensor lengths, Tensor? force_flush, {_FLAGS}) -> ()",
    _replay_verify,
)
_register(
    f"packed_verify({_INPUTS}Tensor initial_state, Tensor(a!)? snapshots, Tensor(b!) out, Tensor ssm_state_indices, "
    f"Tensor lengths, {_FLAGS}) -> ()",
    _packed_verify,
)
_register(
    "causal_conv_verify(Tensor x, Tensor conv_state, Tensor weight, Tensor? bias, Tensor ssm_state_indices, "
    "Tensor lengths, str? activation, Tensor(a!) out) -> ()",
    _causal_conv_verify,
)
_register(
    "commit_cursors(Tensor(a!) cursor, Tensor ssm_state_indices, int ring_len, Tensor lengths, Tensor accepted, "
    "Tensor? force_flush) -> ()",
    _commit_cursors,
)
_register(
    "commit_conv(Tensor(a!) conv_state, Tensor window, Tensor ssm_state_indices, Tensor accepted) -> ()",
    _commit_conv,
)
_register(
    "commit_snapshot(Tensor(a!) initial_state, Tensor snapshots, Tensor ssm_state_indices, Tensor accepted) -> ()",
    _commit_snapshot,
)
_register(
    "commit_kv_replay(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) initial_state, "
    f"Tensor ssm_state_indices, Tensor accepted, {_FLAGS}) -> ()",
    _commit_kv_replay,
)

OPS = torch.ops.replayssm
