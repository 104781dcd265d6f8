import pytest

from replayssm.errors import DeviceError
from replayssm.kernels.choose import backend


def test_every_backend_offers_every_operation():
    import replayssm.kernels.torch_backend as torch_backend

    module = backend("cpu")
    assert all(callable(getattr(module, name)) for name in torch_backend.__all__)


def test_unknown_device_names_the_known_ones():
    with pytest.raises(DeviceError, match=r"'abacus'.*'cpu'"):
        backend("abacus")
