"""What the commands print: progress on stderr, tables on stdout, plain text where there is no terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 10_000  # lines in a file are as long as they are


def console(stream: IO[str]) -> Console:
    """A rich console on `stream`; nothing is wrapped or cut for a terminal that is not there."""
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@contextmanager
def step(text: str, quiet: bool = False) -> Iterator[None]:
    """Say on stderr what is being done, then how long it took."""
    if quiet:
        yield
        return
    err = console(sys.stderr)
    start = time.perf_counter()
    if err.is_terminal:
        with err.status(f"{text} …"):
            yield
    else:
        print(f"{text} …", file=sys.stderr, flush=True)
        yield
    print(f"{text}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def counter(text: str, total: int, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Progress of `total` equal steps on stderr: a bar on a terminal, one line elsewhere. Yields what counts one."""
    if quiet or not sys.stderr.isatty():
        with step(text, quiet):
            yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], stream: IO[str] | None = None, left: int = 1
) -> None:
    """Aligned columns: the first `left` to the left, the rest to the right. Widths follow the content.

    A header of empty names is not shown.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold", show_header=any(header))
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="left" if i < left else "right", no_wrap=i == 0 or i >= left)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = console(stream or sys.stdout)
    if not out.is_terminal:
        with out.capture() as captured:
            out.print(table)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=stream or sys.stdout)
        return
    out.print(table)


def write(text: str, dim: bool = False) -> None:
    """Text to stdout at once, as it is; dimmed where `dim` and a terminal is there."""
    if dim and sys.stdout.isatty():
        console(sys.stdout).print(Text(text, style="dim"), end="", soft_wrap=True)
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: object, stream: IO[str]) -> None:
    """One line. Numbers that JSON does not have (NaN, infinity) become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), file=stream)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def human_bytes(n: float) -> str:
    """1234567 -> '1.18 MiB', at least three digits."""
    if abs(n) < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):  # noqa: B007
        n /= 1024
        if abs(n) < 1024:
            break
    return f"{n:.0f} {unit}" if abs(n) >= 1000 else f"{n:#.3g} {unit}".replace(". ", " ")
