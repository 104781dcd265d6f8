import pytest

from replayssm.errors import DeviceError
from replayssm.kernels.choose import backend


def test_every_backend_offers_every_operation():
    import replayssm.kernels.torch_backend as torch_backend

    for device in ("cpu", "cuda"):
        module = backend(device)
        assert all(callable(getattr(module, name)) for name in torch_backend.__all__)


class Recorder:
    """A backend that says who was called, and may refuse."""

    def __init__(self, name, refuses=None):
        self.__name__, self.refuses, self.calls = name, refuses, []

    def supports(self, *args):
        return self.refuses

    def __getattr__(self, op):
        return lambda *args: self.calls.append((op, args))


@pytest.mark.parametrize(
    ("gluon", "portable", "taken"),
    [
        (Recorder("gluon"), Recorder("portable"), 0),
        (Recorder("gluon", "K = 96"), Recorder("portable"), 1),
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
    assert said == ([] if taken == 0 else [f"decode uses portable: {gluon.refuses if gluon else 'no reason'}"])


def test_unknown_device_names_the_known_ones():
    with pytest.raises(DeviceError, match=r"'abacus'.*'cpu'"):
        backend("abacus")
