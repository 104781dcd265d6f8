"""What a peer is, and what adapters share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from replayssm.bench.case import Case, Shape
from replayssm.bench.kernels import Runner
from replayssm.kernels.policy import Route
from replayssm.spec import Kind


@dataclass(frozen=True)
class Peer:
    """A kernel of another package.

    `skip` says why it cannot run here (one line for people) or None, `make` gives a `Runner`. Everything that an
    engine would do once, and not per step, belongs into `make`. `kind` is the only kind of layer that it knows.

    `tolerance` is the relative error that its check allows beyond our own limits, for a kernel that rounds more than
    its results. It is 0 for every other, and `notes` say what is rounded.
    """

    name: str
    route: Route
    skip: Callable[[Shape], str | None]
    make: Callable[[Case], Runner]
    notes: tuple[str, ...] = ()
    kind: Kind | None = None
    tolerance: float = 0.0


class InPlace:
    """The part of a `Runner` that is the same for kernels that update the pool of the case and write its output."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.scale = case.shape.spec.head_k_dim**-0.5

    def settle(self, copy: int) -> None:
        """Works in place."""

    def output(self, copy: int) -> Tensor:
        """See `Runner`."""
        return self.case.out[copy][:, 0]

    def state(self, copy: int) -> Tensor:
        """See `Runner`."""
        return self.case.state[copy][self.case.slots.long()]


def heads(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each token, apart and contiguous: [B, 1, H, K], [B, 1, H, K], [B, 1, HV, V]."""
    spec, rows = case.shape.spec, case.shape.batch
    h, hv, k_dim, v_dim = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
    tokens = []
    for mixed_qkv in case.mixed_qkv:
        q, k, v = mixed_qkv.split([h * k_dim, h * k_dim, hv * v_dim], -1)
        shapes = ((q, k_dim), (k, k_dim), (v, v_dim))
        q, k, v = (x.reshape(rows, 1, -1, dim).contiguous() for x, dim in shapes)
        tokens.append((q, k, v))
    return tokens


def why_absent(module: str, name: str, install: str) -> str | None:
    """Why `module.name` cannot be had, or None. Imports it: an installed package may still lack it, or fail."""
    package = module.partition(".")[0]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if missing == package:
            return f"not installed; pip install {install}"
        if missing.startswith(f"{package}."):
            return f"the installed {package} has no {missing}"
        return f"{package} needs {missing}, which is not installed"
    except Exception as error:  # whatever goes wrong in a package that is not ours
        return f"{package} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None if getattr(found, name, None) is not None else f"the installed {package} has no {module}.{name}"


def why_not_cuda(shape: Shape) -> str | None:
    """All peers are GPU kernels."""
    return None if shape.device.type == "cuda" else f"runs on CUDA only, not on {shape.device.type}"
