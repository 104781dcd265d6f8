"""Adapters of other packages' kernels, by stand-ins that take what those take and compute by the reference."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from replayssm import reference
from replayssm.bench import timing
from replayssm.bench.case import Shape, timed_case
from replayssm.bench.check import check
from replayssm.bench.peers import PEERS, fla, flashinfer, peer, sglang
from replayssm.spec import LayerSpec

KINDS = {
    "gdn": LayerSpec("gdn", 2, 4, 16, 24),
    "gdn-negative": LayerSpec("gdn", 2, 4, 16, 24, beta_scale=2.0),
    "kda": LayerSpec("kda", 2, 2, 16, 24),
    "kda-grouped": LayerSpec("kda", 1, 2, 16, 24),
    "kda-bounded": LayerSpec("kda", 1, 2, 16, 24, lower_bound=-5.0),
}
BF16 = torch.bfloat16


def shape(kind="gdn", batch=5, ring_len=4, state="float32", device="cpu"):
    spec = kind if isinstance(kind, LayerSpec) else KINDS[kind]
    return Shape(spec, batch, ring_len, state, "bfloat16", torch.device(device))


def on_gpu(*args, **kwargs):
    return replace(shape(*args, **kwargs), device=torch.device("cuda", 0))


def passes(of, at, make=None):
    verdict = check(at, of.route, make or of.make)
    return verdict.output <= verdict.output_limit + of.tolerance and verdict.state <= verdict.state_limit + of.tolerance


def find(name, kind):
    (found,) = (p for p in PEERS if p.name.startswith(name) and p.kind in (None, kind))
    return found


def install(monkeypatch, module, **functions):
    parts = module.split(".")
    for n in range(1, len(parts)):
        parent = ".".join(parts[:n])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    fake = ModuleType(module)
    vars(fake).update(functions)
    monkeypatch.setitem(sys.modules, module, fake)


def packed(mixed_qkv, a, b, A_log, dt_bias, scale, state, **gates):
    """One token in fp64: out [B, HV, V] and the new state."""
    out, new = reference.serial(mixed_qkv[:, None], a[:, None], b[:, None], A_log, dt_bias, scale, state, **gates)
    return out[:, 0], new


# fla-core


def fla_gdn(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    assert gk is None
    assert gv is None
    assert g.ndim == beta.ndim == 3
    flags = (output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, state_v_first)
    assert all(flags)
    assert not kwargs
    assert initial_state.dtype == torch.float32
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    out, state = reference.serial(
        mixed, g, beta, A_log, dt_bias, scale, initial_state, beta_scale=2.0 if allow_neg_eigval else 1.0
    )
    return out.to(v.dtype), state.float()


def fla_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    assert not allow_neg_eigval
    assert not kwargs
    flags = (output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, state_v_first)
    assert all(flags)
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    out, state = reference.serial(
        mixed, g, beta, A_log, dt_bias, scale, initial_state, is_kda=True, lower_bound=lower_bound
    )
    return out.to(v.dtype), state.float()


@pytest.fixture
def with_fla(monkeypatch):
    install(monkeypatch, "fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=fla_gdn)
    install(monkeypatch, "fla.ops.kda", fused_recurrent_kda=fla_kda)


@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("kind", KINDS)
def test_fla_core_passes_the_check(kind):
    of = find("fla-core", KINDS[kind].kind)
    assert of.skip(on_gpu(kind)) is None
    assert of.tolerance == 0
    assert passes(of, shape(kind))


@pytest.mark.usefixtures("with_fla")
def test_fla_core_leaves_the_states_of_the_case():
    case = timed_case(shape(), copies=2)
    before = [s.clone() for s in case.state]
    timing.period(fla.Fla(case), case)
    assert all(torch.equal(x, y) for x, y in zip(before, case.state, strict=True))


# SGLang


def sglang_packed(is_kda):
    def run(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False,
        lower_bound=None,
    ):  # fmt: skip
        _, hv, _, k_dim = initial_state.shape
        assert use_qk_l2norm_in_kernel
        assert dt_bias.ndim == 1
        assert a.shape == (len(b), hv * k_dim if is_kda else hv)
        if is_kda:
            a, dt_bias = a.unflatten(1, (hv, k_dim)), dt_bias.unflatten(0, (hv, k_dim))
        else:
            b = torch.logit(torch.sigmoid(b).double())  # beta through bf16
        slots = ssm_state_indices.long()
        gates = dict(is_kda=is_kda, lower_bound=lower_bound)
        o, state = packed(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state[slots], **gates)
        initial_state[slots] = state.to(initial_state.dtype)
        out.copy_(o[:, None])

    return run


class Replay:
    """Rows one by one: rebuild the state from what the ring holds, round what the ring holds to bf16."""

    def __init__(self, damage=None):
        self.damage = damage

    def __call__(
        self, mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices,
        write_pos, force_flush=None, use_qk_l2norm_in_kernel=False, is_kda=False,
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel
        assert g_cache.dtype == torch.float32
        assert d_cache.dtype == k_cache.dtype == initial_state.dtype
        _, hv, v_dim, k_dim = initial_state.shape
        h = k_cache.shape[1]
        for row, slot in enumerate(ssm_state_indices.tolist()):
            n, last = int(write_pos[row]), k_cache.shape[2] - 1
            d, k, g = (x[slot, :, :n].double() for x in (d_cache, k_cache, g_cache))
            g = g.reshape(hv, n, k_dim if is_kda else 1)
            later = g.flip(1).cumsum(1).flip(1) - g
            fold = (
                d.transpose(1, 2).to(BF16).double() @ (k.repeat_interleave(hv // h, 0) * later.exp()).to(BF16).double()
            )
            state = initial_state[slot].double() * g.sum(1, keepdim=True).exp() + fold
            one = slice(row, row + 1)
            gates = (a[one], b[one], A_log, dt_bias, scale)
            o, new = packed(mixed_qkv[one], *gates, state[None], is_kda=is_kda)
            out[row, 0] = o[0]
            flush = n == last or int(force_flush[row]) != 0
            if flush and self.damage != "no flush":
                initial_state[slot] = new[0].to(initial_state.dtype)
            if flush or self.damage == "no append":
                continue
            x = (a[row].double() + dt_bias.double()).reshape(hv, -1)
            gate = -A_log.double().exp()[:, None] * F.softplus(x)
            raw_k = mixed_qkv[row, h * k_dim : 2 * h * k_dim].double().reshape(h, k_dim)
            unit = raw_k * (raw_k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            wide = unit.repeat_interleave(hv // h, 0)
            value = mixed_qkv[row, 2 * h * k_dim :].double().reshape(hv, v_dim)
            before = ((state * gate.exp()[:, None]) @ wide[..., None])[..., 0]
            d_cache[slot, :, n] = torch.sigmoid(b[row].double())[:, None] * (value - before)
            k_cache[slot, :, n] = unit.to(BF16).to(k_cache.dtype)
            g_cache[slot, :, n] = gate if is_kda else gate[:, 0]


@pytest.fixture
def with_sglang(monkeypatch):
    install(
        monkeypatch, "sglang.kernels.ops.attention.fla.fused_recurrent",
        fused_recurrent_gated_delta_rule_packed_decode=sglang_packed(False),
        fused_recurrent_kda_packed_decode=sglang_packed(True),
    )  # fmt: skip
    install(monkeypatch, sglang.REPLAY[0], **{sglang.REPLAY[1]: Replay()})


@pytest.mark.usefixtures("with_sglang")
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "kda-grouped", "kda-bounded"])
def test_packed_sglang_passes_the_check(kind, state):
    of = find("SGLang packed", KINDS[kind].kind)
    assert of.skip(on_gpu(kind, state=state)) is None
    assert passes(of, shape(kind, state=state))


@pytest.mark.usefixtures("with_sglang")
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "kda-grouped"])
def test_sglangs_replay_passes_the_check(kind, state):
    wide = replace(KINDS[kind], head_k_dim=20)
    of = find("SGLang replay", wide.kind)
    assert of.skip(on_gpu(wide, state=state)) is None
    assert passes(of, shape(wide, ring_len=5, state=state))


@pytest.mark.usefixtures("with_sglang")
def test_inexact_kernels_need_their_tolerance_and_exact_ones_have_none():
    for of, kind in ((find("SGLang packed", "gdn"), "gdn"), (find("SGLang replay", "kda"), "kda")):
        verdict = check(shape(kind, ring_len=16), of.route, of.make)
        assert not verdict.ok
        assert verdict.state < of.tolerance < 0.005
        assert "its check allows" in of.notes[0]
    assert [p.name for p in PEERS if p.tolerance and p.kind != "gdn"] == ["SGLang replay"]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("damage", [None, "no flush", "no append"])
def test_damage_is_larger_than_the_tolerance(kind, damage, monkeypatch):
    install(monkeypatch, sglang.REPLAY[0], **{sglang.REPLAY[1]: Replay(damage)})
    assert passes(find("SGLang replay", kind), shape(kind)) == (damage is None)


@pytest.mark.usefixtures("with_sglang")
def test_a_timed_replay_starts_in_the_middle_of_its_rings():
    case = timed_case(shape(ring_len=4), copies=2)
    runner = sglang.SglangReplay(case)
    timing.period(runner, case)
    assert all(bool(runner.state(copy).isfinite().all()) for copy in range(2))


# FlashInfer


def flashinfer_gdn(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None,
    initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None, disable_state_update=False,
    backend="auto",
):  # fmt: skip
    assert state is None
    assert use_qk_l2norm
    assert a.shape == b.shape == v.shape[:3]
    slots = initial_state_indices.long()
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    out, new = reference.serial(mixed, a, b, A_log, dt_bias, scale, initial_state[slots])
    initial_state[slots] = new.to(initial_state.dtype)
    output.copy_(out)
    return output, initial_state


def flashinfer_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, ssm_state_indices=None,
    num_spec_tokens=None, num_accepted_tokens=None, output=None, initial_state_source=None, initial_state_indices=None,
    beta_is_logit=False,
):  # fmt: skip
    rows = len(ssm_state_indices)
    assert cu_seqlens.tolist() == list(range(rows + 1))
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] == g.shape[:2] == beta.shape[:2] == output.shape[:2] == (1, rows)
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, output))
    assert use_gate_in_kernel
    assert beta_is_logit
    slots = ssm_state_indices.long()
    mixed = torch.cat([x[0].flatten(1) for x in (q, k, v)], -1)
    gates = (A_log, dt_bias.view_as(g[0, 0]), scale, initial_state[slots])
    out, new = packed(mixed, g[0], beta[0], *gates, is_kda=True, lower_bound=lower_bound)
    initial_state[slots] = new.to(initial_state.dtype)
    output.copy_(out[None])
    return output, None


@pytest.fixture
def with_flashinfer(monkeypatch):
    install(monkeypatch, "flashinfer.gdn_decode", gated_delta_rule_decode_pretranspose=flashinfer_gdn)
    install(monkeypatch, "flashinfer.kda", recurrent_kda=flashinfer_kda)


@pytest.mark.usefixtures("with_flashinfer")
@pytest.mark.parametrize(
    ("kind", "state"), [("gdn", "float32"), ("gdn", "bfloat16"), ("kda", "bfloat16"), ("kda-bounded", "bfloat16")]
)
def test_flashinfer_passes_the_check(kind, state):
    of = find("FlashInfer", KINDS[kind].kind)
    assert of.tolerance == 0
    assert passes(of, shape(kind, state=state))


@pytest.mark.usefixtures("with_flashinfer")
def test_why_flashinfer_is_skipped(monkeypatch):
    gdn, kda = LayerSpec("gdn", 2, 4, 128, 128), LayerSpec("kda", 2, 2, 128, 128)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert flashinfer.skip(on_gpu(gdn)) is None
    assert flashinfer.skip(on_gpu(gdn, state="bfloat16")) is None
    assert flashinfer.skip(on_gpu(kda, state="bfloat16")) is None
    assert "not in float16" in flashinfer.skip(on_gpu(gdn, state="float16"))
    assert "KDA state in bfloat16 only" in flashinfer.skip(on_gpu(kda))
    assert "128/128 only, not 16/24" in flashinfer.skip(on_gpu("gdn"))
    assert "beta scale" in flashinfer.skip(on_gpu(replace(gdn, beta_scale=2.0)))
    assert "each key head" in flashinfer.skip(on_gpu(replace(kda, num_v_heads=4), state="bfloat16"))
    assert "activations" in flashinfer.skip(replace(on_gpu(gdn), io_dtype="float16"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "nvidia-cutlass-dsl" in flashinfer.skip(on_gpu(gdn))


# all


def test_a_kernel_of_one_kind_is_not_in_the_way_of_another():
    for kind in ("gdn", "kda"):
        names = [p.name for p in PEERS if p.kind in (None, kind)]
        assert len(names) == len(set(names)) == 4


class Nothing:
    """None of the peers' packages is installed."""

    def find_spec(self, name, path=None, target=None):
        if name in ("fla", "sglang", "flashinfer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("of", PEERS, ids=lambda p: f"{p.name}-{p.kind}")
def test_peers_run_on_cuda_only_and_where_installed(of, monkeypatch):
    spec = LayerSpec(of.kind or "gdn", 2, 2, 128, 128)
    state = "bfloat16" if of.make is flashinfer.FlashInferKda else "float32"
    assert of.skip(shape(spec, state=state)) == "runs on CUDA only, not on cpu"
    monkeypatch.setattr(sys, "meta_path", [Nothing(), *sys.meta_path])
    assert of.skip(on_gpu(spec, state=state)).startswith("not installed; pip install ")


def test_what_a_peer_cannot_do():
    assert "float32 only, not in bfloat16" in fla.skip(on_gpu(state="bfloat16"))
    assert "beta scale of 3" in fla.skip(on_gpu(replace(KINDS["gdn"], beta_scale=3.0)))
    assert "beta scale of 2" in sglang.skip(on_gpu("gdn-negative"), sglang.PACKED["gdn"])
    assert "bounded gate" in sglang.skip_replay(on_gpu("kda-bounded"))
    assert "head dim of 16" in sglang.skip_replay(on_gpu("gdn"))


def test_a_package_that_is_there_may_still_not_do(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {
        "peer_old": "", "peer_needs": "import peer_absent", "peer_broken": "1 / 0", "peer_half": "kernel = None",
        "peer_good": "kernel = print",
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    assert peer.why_absent("peer_none", "kernel", "peer") == "not installed; pip install peer"
    assert peer.why_absent("peer_old.ops", "kernel", "peer") == "the installed peer_old has no peer_old.ops"
    assert peer.why_absent("peer_needs", "kernel", "peer") == "peer_needs needs peer_absent, which is not installed"
    assert "cannot be imported: ZeroDivisionError" in peer.why_absent("peer_broken", "kernel", "peer")
    assert peer.why_absent("peer_half", "kernel", "peer") == "the installed peer_half has no peer_half.kernel"
    assert peer.why_absent("peer_good", "kernel", "peer") is None
