"""Parse, dispatch, and turn every failure into one line and an exit code.

Exit codes: 0 done, 1 a check failed, 2 wrong input, 70 an error inside the program, 74 output that cannot be
written, 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from importlib import import_module
from typing import IO, Any

from replayssm.cli.parser import build_parser
from replayssm.errors import ReplayError

EXIT_INTERNAL = 70
EXIT_OUTPUT = 74
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows '?', it does not stop the text
            stream.reconfigure(errors="replace")
    people, sys.stderr = sys.stderr, _Forgiving(sys.stderr)
    try:
        return _run(words)
    finally:
        sys.stderr = people


def _run(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        args = build_parser().parse_args(words)
        request = args.request(args)  # refuses wrong options before torch is imported
        args.out = sys.stdout
        # With --json, standard output is that one line and everything for people goes to standard error.
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            code: int = import_module(f"replayssm.cli.{args.command}").run_command(request)
        args.out.flush()
        return code
    except SystemExit as leave:  # argparse after --help and --version
        return int(leave.code or 0)
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ReplayError as error:
        return _report(str(error), error.exit_code, debug)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            return _report(f"unexpected {type(error).__name__}: {error}", EXIT_INTERNAL, debug)
        return _report(f"the output cannot be written: {error.strerror}", EXIT_OUTPUT, debug)
    except Exception as error:
        return _report(f"unexpected {type(error).__name__}: {error}", EXIT_INTERNAL, debug)


class _Forgiving:
    """Standard error whose reader may go away: what people no longer read must not stop the work or its result."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(BrokenPipeError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _report(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    hint = "" if code == 2 or debug else " (--debug shows where)"
    print(f"error: {' '.join(text.split())}{hint}", file=sys.stderr)
    return code
