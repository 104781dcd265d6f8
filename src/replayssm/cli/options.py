"""Checked options of `check` and `study`, and what `generate` shares: all that can be refused without torch."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from replayssm.checks import at_least, needs_matplotlib, writable
from replayssm.dtypes import parse_state_dtype
from replayssm.errors import OptionError, PromptError
from replayssm.spec import DEFAULT_RING_LEN, check_ring_len
from replayssm.study.task import SETS

# Of `study task`: problems of a set.
COUNT = 400
# Of `study numerics`: steps of one layer, tokens a row of a model.
STEPS, QUICK_STEPS = 8192, 512
TOKENS, QUICK_TOKENS = 512, 32

# A heading as in the shipped model's training text, and a few words.
SAMPLE_PROMPT = "Pride and Prejudice, Chapter 62\n\nElizabeth was sitting by the window, when"


@dataclass(frozen=True)
class Decode:
    """How to decode: ring length, and the state dtype if the command line names one."""

    ring_len: int
    state_dtype: str | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Decode:
        """Check `--ring-len` and `--state-dtype`."""
        ring_len = check_ring_len(DEFAULT_RING_LEN if args.ring_len is None else args.ring_len)
        given = args.state_dtype
        return cls(ring_len, None if given is None else parse_state_dtype(given, "--state-dtype"))


class CheckRequest(NamedTuple):
    """Checked input of `check`."""

    args: argparse.Namespace
    prompt: str
    tokens: int
    decode: Decode

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CheckRequest:
        """Raises `OptionError`, `RingLengthError`, `DtypeError` or `PromptError`."""
        tokens, decode = at_least("--tokens", args.tokens), Decode.from_args(args)
        return cls(args, read_prompt(args), tokens, decode)


class TaskRequest(NamedTuple):
    """Checked input of `study task`. `models` None: all shipped; `sets`: names in `study.task.SETS`."""

    args: argparse.Namespace
    models: tuple[str, ...] | None
    problems: int
    sets: tuple[str, ...]
    file: Path | None

    @property
    def command(self) -> str:
        """The command line that gives this request, defaults written out."""
        return _command("study task", self.args, count=self.problems, sets=self.args.sets, out=self.file)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TaskRequest:
        """Raises `OptionError`."""
        file = None if args.out is None else writable("--out", Path(args.out))
        sets = tuple(dict.fromkeys(args.sets.split(",")))
        if unknown := [name for name in sets if name not in SETS]:
            raise OptionError(f"--sets has {unknown[0]!r}; sets of problems: {', '.join(SETS)}")
        return cls(args, _models(args.models), at_least("--count", args.count), sets, file)


class StudyRequest(NamedTuple):
    """Checked input of `study numerics`. `source`: results to show again; `models` None: all shipped."""

    args: argparse.Namespace
    source: Path | None
    models: tuple[str, ...] | None
    text: Path | None
    steps: int
    tokens: int
    folder: Path | None

    @property
    def command(self) -> str:
        """The command line that gives this request, defaults written out."""
        flags = "study numerics --quick" if self.args.quick else "study numerics"
        return _command(flags, self.args, text=self.text, steps=self.steps, tokens=self.tokens, out=self.folder)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> StudyRequest:
        """Raises `OptionError`."""
        steps, tokens = (QUICK_STEPS, QUICK_TOKENS) if args.quick else (STEPS, TOKENS)
        steps = at_least("--steps", steps if args.steps is None else args.steps)
        tokens = at_least("--tokens", tokens if args.tokens is None else args.tokens)
        source, text, folder = (None if path is None else Path(path) for path in (args.source, args.text, args.out))
        if folder is not None:
            if folder.exists() and not folder.is_dir():
                raise OptionError(f"--out {folder} is a file; name a folder")
            needs_matplotlib("--out")
        return cls(args, source, _models(args.models), text, steps, tokens, folder)


def _models(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name for name in text.split(",") if name != "none")


def _command(words: str, args: argparse.Namespace, **given: object) -> str:
    found = ["replayssm", *words.split()]
    for name, value in (dict(models=args.models) | given | dict(device=args.device)).items():
        found += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(found)


@contextmanager
def named_as_options(others: Mapping[str, str] | None = None) -> Iterator[None]:
    """Messages of dataclasses of options begin with a field, and may name others; here these are options.

    `others` are fields whose option has another name.
    """
    names = {name: "--" + name.replace("_", "-") for name in ("ring_len", "spec_tokens", "spec_state")}
    names |= others or {}
    try:
        yield
    except OptionError as error:
        name, _, rest = str(error).partition(" ")
        for field, option in names.items():
            rest = re.sub(rf"\b{field}\b", option, rest)
        raise OptionError(f"{names.get(name, '--' + name.replace('_', '-'))} {rest}") from error


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text from `--prompt`, a file or standard input; a sample when none is named.

    One newline at the end of a file is the file's, not the prompt's, and is dropped.
    """
    source, text = "--prompt", args.prompt
    if args.prompt_file is not None:
        source = "standard input" if args.prompt_file == "-" else f"prompt file {args.prompt_file}"
        if args.prompt_file == "-" and sys.stdin is None:
            raise PromptError("standard input is closed; give --prompt or --prompt-file")
        try:
            raw = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
            text = raw.decode("utf-8").replace("\r\n", "\n").removesuffix("\n")
        except OSError as error:
            raise PromptError(f"{source} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise PromptError(f"{source} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from error
    if text is None:
        return SAMPLE_PROMPT
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8 arrive as lone surrogates
        raise PromptError(f"the prompt from {source} is not UTF-8 at character {error.start}") from error
    if not text.strip():
        raise PromptError(f"the prompt from {source} is empty; give at least one word")
    return text
