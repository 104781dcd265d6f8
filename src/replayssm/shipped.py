"""Where the files that come with the package lie: in the installed package, or in the tree that it runs from."""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).resolve().parent / "assets"
ASSETS = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "assets"
SHIPPED: dict[str, Path] = {name: ASSETS / name for name in ("gdn", "kda")}  # model folders by name
HELD_OUT = ASSETS / "heldout.txt"  # chapters that no shipped model was trained on
