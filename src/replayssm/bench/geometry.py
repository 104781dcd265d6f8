"""Linear-attention layers by the name of a checkpoint, from the planner's table. Needs no torch."""

from __future__ import annotations

from replayssm.errors import OptionError
from replayssm.planner.checkpoints import GEOMETRIES, Geometry, known, nearest
from replayssm.spec import Kind

__all__ = ["DEFAULT_DIMS", "DEFAULT_HEADS", "GEOMETRIES", "Geometry", "find"]

DEFAULT_HEADS: dict[Kind, tuple[int, int]] = {"gdn": (16, 32), "kda": (32, 32)}
DEFAULT_DIMS = (128, 128)


def find(name: str) -> tuple[str, Geometry]:
    """The name as the table spells it, and its entry; case does not matter. `OptionError` with near names."""
    found = known(name)
    if found is None:
        raise OptionError(
            f"model {name!r} is not in the table of geometries; nearest: {', '.join(nearest(name))}. "
            "Others: --kind, --heads and --dims"
        )
    return found
