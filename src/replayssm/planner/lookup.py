"""From what a user types to a geometry: a shipped model, a file, a folder, or a name of the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from replayssm.errors import ModelFilesError, ModelNotFoundError, UnsupportedModelError
from replayssm.planner.checkpoints import Geometry, known, nearest
from replayssm.planner.config import read_config, state_dtype_of
from replayssm.shipped import SHIPPED

# Checkpoints of these names have Mamba-2 layers.
MAMBA2_NAMES = ("nemotron", "falcon-h1", "granite-4", "bamba", "zamba", "mamba")


class Model(NamedTuple):
    """A model to plan for. `weights` are bytes, None where nothing says; `state_dtype` is what its config asks for."""

    name: str
    source: str
    geometry: Geometry
    weights: int | None
    weights_source: str
    state_dtype: str | None = None


def find(text: str) -> Model:
    """Look up `text`: a shipped name, a config.json, a folder that has one, or a known checkpoint.

    Raises `ModelNotFoundError` with near names, `UnsupportedModelError`, `ModelFilesError` or `ShapeError`.
    """
    if text in SHIPPED:
        return _from_file(text, SHIPPED[text] / "config.json")
    file = _file(text)
    if file is not None:
        return _from_file(text, file)
    found = known(text)
    if found is not None:
        name, geometry = found
        said = "bf16, text model" if geometry.parameters is not None else "not known for this name"
        return Model(name, "the table of known checkpoints", geometry, geometry.weight_bytes, said)
    if any(part in text.lower() for part in MAMBA2_NAMES):
        raise UnsupportedModelError(
            f"model {text!r} has Mamba-2 layers; replay knows Gated DeltaNet and Kimi Delta Attention"
        )
    near = ", ".join([*nearest(text), *SHIPPED])
    raise ModelNotFoundError(
        f"model {text!r} is no file, no folder and no known checkpoint; nearest: {near}. Any config.json will do"
    )


def _file(text: str) -> Path | None:
    """The config that a path names: the file itself, or a folder's config.json, which may be missing."""
    try:
        path = Path(text).expanduser()
        if text and path.is_dir():
            return path / "config.json"
        return path if text and path.is_file() else None
    except (OSError, RuntimeError):  # a name too long for the file system, an unknown ~user
        return None


def _from_file(name: str, file: Path) -> Model:
    if not file.is_file():
        raise ModelNotFoundError(f"{file.parent} has no config.json; give a folder as the hub lays it out, or a name")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFilesError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ModelFilesError(f"{file} is not JSON: {error}") from error
    geometry = read_config(config, str(file))
    # Only the folder's own config speaks for the weights that lie in it.
    sizes = [f.stat().st_size for f in file.parent.glob("*.safetensors")] if file.name == "config.json" else []
    weights = sum(sizes) if sizes else None
    said = f"{len(sizes)} safetensors file{'s' * (len(sizes) > 1)}" if sizes else "no safetensors files beside it"
    return Model(name, str(file), geometry, weights, said, state_dtype_of(config))
