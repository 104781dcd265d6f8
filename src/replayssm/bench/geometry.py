"""Linear-attention layers of known checkpoints, by name. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from replayssm.errors import OptionError
from replayssm.spec import Kind, LayerSpec


@dataclass(frozen=True)
class Geometry:
    """One linear layer of a checkpoint, and how many of its layers are such."""

    spec: LayerSpec
    linear_layers: int
    all_layers: int

    @property
    def state_bytes(self) -> int:
        """fp32 state of one request, all layers."""
        return self.linear_layers * self.spec.state_array(1).nbytes


def _geometry(
    kind: Kind,
    layers: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int] = (128, 128),
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> Geometry:
    return Geometry(LayerSpec(kind, *heads, *dims, lower_bound=lower_bound, beta_scale=beta_scale), *layers)


GEOMETRIES = {
    "Qwen3.5-0.8B": _geometry("gdn", (18, 24), (16, 16)),
    "Qwen3.5-4B": _geometry("gdn", (24, 32), (16, 32)),
    "Qwen3.5-9B": _geometry("gdn", (24, 32), (16, 32)),
    "Qwen3.5-27B": _geometry("gdn", (48, 64), (16, 48)),
    "Qwen3.6-27B": _geometry("gdn", (48, 64), (16, 48)),
    "Qwen3.8-27B": _geometry("gdn", (48, 64), (16, 48)),
    "Qwen3.5-35B-A3B": _geometry("gdn", (30, 40), (16, 32)),
    "Qwen3.6-35B-A3B": _geometry("gdn", (30, 40), (16, 32)),
    "Qwen3-Next-80B-A3B": _geometry("gdn", (36, 48), (16, 32)),
    "Qwen3.5-122B-A10B": _geometry("gdn", (36, 48), (16, 64)),
    "Qwen3.5-397B-A17B": _geometry("gdn", (45, 60), (16, 64)),
    "OLMo-Hybrid-7B": _geometry("gdn", (24, 32), (30, 30), (96, 192), beta_scale=2.0),
    "Kimi-Linear-48B-A3B": _geometry("kda", (20, 27), (32, 32)),
    "Ling-3.0-flash": _geometry("kda", (35, 42), (32, 32), lower_bound=-5.0),
    "GLM-5.3-Flash": _geometry("kda", (34, 45), (64, 64), lower_bound=-5.0),
    "Kimi-K3": _geometry("kda", (69, 93), (96, 96)),
}
DEFAULT_HEADS: dict[Kind, tuple[int, int]] = {"gdn": (16, 32), "kda": (32, 32)}
DEFAULT_DIMS = (128, 128)


def find(name: str) -> tuple[str, Geometry]:
    """The name as the table spells it, and its entry; case does not matter. `OptionError` with near names."""
    names = {known.lower(): known for known in GEOMETRIES}
    wanted = name.strip().lower().rpartition("/")[2]
    if wanted in names:
        return names[wanted], GEOMETRIES[names[wanted]]
    near = [names[n] for n in get_close_matches(wanted, names, n=3, cutoff=0.4)] or list(GEOMETRIES)
    raise OptionError(
        f"model {name!r} is not in the table of geometries; nearest: {', '.join(near)}. "
        "Others: --kind, --heads and --dims"
    )
