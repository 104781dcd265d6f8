import pytest
import torch

from replayssm.errors import DeviceError
from replayssm.kernels.choose import backend


def test_every_backend_offers_every_operation():
    import replayssm.kernels.torch_backend as torch_backend

    for device in ("cpu", "cuda"):
        module = backend(device)
        assert all(callable(getattr(module, name)) for name in torch_backend.__all__)


class Recorder:
    """A backend that says who was called, and may refuse."""

    def __init__(self, name, refuses=None, too_long=None):
        self.__name__, self.refuses, self.too_long, self.calls, self.asked = name, refuses, too_long, [], []

    def supports(self, state):
        return self.refuses(state) if callable(self.refuses) else self.refuses

    def verifies(self, *window):
        self.asked.append(window)
        return self.too_long

    def __getattr__(self, op):
        return lambda *args: self.calls.append((op, args))


@pytest.mark.parametrize(
    ("gluon", "portable", "taken"),
    [
        (Recorder("gluon"), Recorder("portable"), 0),
        (Recorder("gluon", "K = 33"), Recorder("portable"), 1),
        (None, Recorder("portable"), 1),
    ],
)
def test_a_gpu_call_takes_the_first_kernels_that_apply(monkeypatch, caplog, gluon, portable, taken):
    from replayssm.kernels import cuda

    monkeypatch.setattr(cuda, "_modules", lambda: (gluon, portable, "no reason"))
    cuda._say.cache_clear()
    args = tuple(range(18))
    with caplog.at_level("INFO"):
        for _ in range(2):
            cuda.replay_decode(*args)
            cuda.packed_decode(*args[:13])
            cuda.flush(*args[:7])
    want = [("replay_decode", args), ("packed_decode", args[:13]), ("flush", args[:7])] * 2
    assert (gluon, portable)[taken].calls == want
    said = [record.message for record in caplog.records]
    why = gluon.refuses if gluon else "no reason"
    assert said == ([] if taken == 0 else [f"decode and flush: portable, since {why}"])


@pytest.mark.parametrize(
    ("gluon", "portable", "taken"),
    [
        (Recorder("gluon"), Recorder("portable"), 0),
        (Recorder("gluon", "K = 33"), Recorder("portable"), 1),
        (Recorder("gluon", too_long="T = 9"), Recorder("portable"), 1),
        (None, Recorder("portable"), 1),
        (None, None, 2),
    ],
)
def test_a_window_takes_the_first_kernels_that_apply(monkeypatch, caplog, gluon, portable, taken):
    from replayssm.kernels import cuda

    plain = Recorder("torch")
    monkeypatch.setattr(cuda, "_modules", lambda: (gluon, portable, "no reason"))
    monkeypatch.setattr(cuda, "_torch", lambda: plain)
    cuda._say.cache_clear()
    args = tuple(torch.empty(1, 2, 3 + i) for i in range(19))
    with caplog.at_level("INFO"):
        for _ in range(2):
            cuda.replay_verify(*args)
    assert (gluon, portable, plain)[taken].calls == [("replay_verify", args)] * 2
    if gluon:
        assert gluon.asked == [] if gluon.refuses else [(args[6], args[0], args[10], 9)] * 2
    name, why = ("portable", "torch")[taken - 1], (gluon and (gluon.refuses or gluon.too_long)) or "no reason"
    said = [record.message for record in caplog.records]
    assert said == ([] if taken == 0 else [f"verify on a ring: {name}, since {why}"])


REST = (
    "materialize", "causal_conv_update", "advance_cursors", "gather_cursors", "force_flush_mask", "packed_verify",
    "causal_conv_verify", "commit_cursors", "commit_conv", "commit_snapshot", "commit_kv_replay",
)  # fmt: skip


@pytest.mark.parametrize("triton", [True, False])
def test_the_other_operations_take_portable_kernels_or_torch(monkeypatch, caplog, triton):
    from replayssm.kernels import cuda

    gluon, portable, plain = Recorder("gluon"), Recorder("portable"), Recorder("torch")
    monkeypatch.setattr(cuda, "_modules", lambda: (gluon, portable, "") if triton else (None, None, "no Triton"))
    monkeypatch.setattr(cuda, "_torch", lambda: plain)
    cuda._say.cache_clear()
    with caplog.at_level("INFO"):
        for op in REST * 2:
            getattr(cuda, op)(op, 1, None)
        if not triton:
            cuda.flush(*range(7))
    want = [(op, (op, 1, None)) for op in REST * 2]
    assert (portable if triton else plain).calls[: len(want)] == want
    assert gluon.calls == []
    said = [record.message for record in caplog.records]
    groups = ("conv update, materialize and cursors", "decode and flush")
    assert said == ([] if triton else [f"{group}: torch, since no Triton" for group in groups])


def test_the_real_modules_offer_what_is_taken_from_them():
    from replayssm.kernels import cuda, torch_backend

    gluon, portable, _ = cuda._modules()
    for module, names in (
        (portable, cuda.__all__),
        (gluon, ("replay_decode", "packed_decode", "replay_verify", "flush", "supports", "verifies")),
    ):
        assert module is None or all(callable(getattr(module, name)) for name in names)
    assert set(cuda.__all__) == set(torch_backend.__all__)


@pytest.mark.parametrize(
    ("gluon", "portable", "lines"),
    [
        (
            Recorder("gluon", lambda state: None if state.shape[-1] == 128 else f"K = {state.shape[-1]}"),
            Recorder("portable"),
            [
                "decode and flush on cuda:0: gluon, or triton where gluon has no kernel (such as K = 33)",
                "conv update, materialize and cursors: triton; gluon has none of them",
            ],
        ),
        (
            Recorder("gluon", "compute capability 8.0"),
            Recorder("portable"),
            ["decode and flush on cuda:0: triton; no gluon, compute capability 8.0", "conv update"],
        ),
        (None, Recorder("portable"), ["decode and flush: triton; no gluon, no reason", "conv update"]),
        (
            None,
            None,
            ["decode and flush, conv update, materialize and cursors: torch, which waits for the GPU; no reason"],
        ),
    ],
)
def test_env_says_which_kernels_and_why_not_others(monkeypatch, gluon, portable, lines):
    from replayssm.kernels import cuda

    monkeypatch.setattr(cuda, "_modules", lambda: (gluon, portable, "no reason"))
    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 1)
    empty = cuda.torch.empty
    monkeypatch.setattr(cuda.torch, "empty", lambda *shape, device: empty(*shape, device="meta"))
    said = cuda.describe()
    assert len(said) == len(lines)
    assert all(line.startswith(want) for line, want in zip(said, lines, strict=True)), said


def test_env_survives_a_device_that_cannot_be_used(monkeypatch):
    from replayssm.kernels import cuda

    def full(*shape, device):
        raise RuntimeError(f"CUDA error: out of memory on {device}\nand much advice")

    monkeypatch.setattr(cuda, "_modules", lambda: (Recorder("gluon"), Recorder("portable"), ""))
    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda.torch, "empty", full)
    assert cuda.describe()[0] == "cuda:0 cannot be used: CUDA error: out of memory on cuda:0"


def test_unknown_device_names_the_known_ones():
    with pytest.raises(DeviceError, match=r"'abacus'.*'cpu'"):
        backend("abacus")
