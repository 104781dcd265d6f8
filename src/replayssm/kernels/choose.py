"""Choose the backend of a device. Called once per operation, so it must stay a dictionary look-up."""

from __future__ import annotations

import importlib
from typing import Any

from replayssm.errors import DeviceError

# Device type -> module.
_BACKENDS = {
    "cpu": "replayssm.kernels.torch_backend",
    "cuda": "replayssm.kernels.cuda",
}
_loaded: dict[str, Any] = {}


def backend(device_type: str) -> Any:
    """The backend module for `device_type`; `DeviceError` when there is none."""
    module = _loaded.get(device_type)
    if module is None:
        if device_type not in _BACKENDS:
            raise DeviceError(f"no backend for device {device_type!r}; move the tensors to one of {list(_BACKENDS)}")
        module = _loaded[device_type] = importlib.import_module(_BACKENDS[device_type])
    return module
