"""What every suite of `replayssm bench` does in the end: JSON, and a plot. Needs no torch."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replayssm.cli.console import print_json


def write_json(result: dict[str, Any], args: Namespace) -> None:
    """To the file of `--json`, '-' is standard output; nowhere without it."""
    if args.json_file == "-":
        print_json(result, args.out)
    elif args.json_file is not None:
        with open(args.json_file, "w", encoding="utf-8") as file:
            print_json(result, file)


def write_plot(file: Path | None, draw: Callable[[Path], None]) -> None:
    """`draw` into the file of `--plot`, if there is one."""
    if file is not None:
        draw(file)
        print(f"plot: {file}", file=sys.stderr)
