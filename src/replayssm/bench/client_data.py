"""Prompts for `replayssm bench serve`: words drawn at random, or a file's. Needs no torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from replayssm.errors import OptionError

# No tokenizer is known here; common short words are about a token each.
WORDS = """
the of and to in that he was it his is with as for had you not be her on at by which have or from this him but all she
they were my are me one their so an said them we who would been will no when there if more out up into do any your what
has man could other than our some very time upon about may its only now like little then can made should did us such
great before two must these see know over much down after first good men own never most
"""


class Prompt(NamedTuple):
    """What is asked; `text` for completions, `messages` for chat."""

    text: str
    messages: list[dict[str, Any]]
    max_tokens: int


def synthetic(count: int, words: int, max_tokens: int, seed: int, name: str = "") -> list[Prompt]:
    """Random words after a number; no two prompts begin alike, so that no cache of prefixes helps."""
    draw, known = random.Random(f"{seed} {name}"), WORDS.split()
    texts = [" ".join([f"{name}{i}", *draw.choices(known, k=words - 1)]) for i in range(count)]
    return [_prompt(text, max_tokens) for text in texts]


def read_dataset(file: Path, count: int, max_tokens: int, seed: int) -> list[Prompt]:
    """`count` prompts of a file, drawn anew if it has fewer.

    Lines of JSON with "prompt" or "messages", and "max_tokens" if they have one; or one JSON list of such, or of
    conversations as ShareGPT has them, whose first turn is asked. Raises `OptionError`.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--dataset {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--dataset {file} is not UTF-8: byte {error.start}") from error
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise OptionError(f"--dataset {file} is neither JSON nor lines of JSON: {error}") from error
    found = [_row(file, i, row, max_tokens) for i, row in enumerate(rows, 1)]
    prompts = [one for one in found if one is not None]
    if not prompts:
        raise OptionError(f"--dataset {file} has no prompts")
    draw = random.Random(seed)
    chosen = prompts[:] if len(prompts) <= count else draw.sample(prompts, count)
    return chosen + draw.choices(prompts, k=count - len(chosen))


def _row(file: Path, number: int, row: Any, max_tokens: int) -> Prompt | None:
    """None for a conversation that nobody opens."""
    if isinstance(row, dict):
        most = row.get("max_tokens", max_tokens)
        if isinstance(most, int) and not isinstance(most, bool) and most > 0:
            if isinstance(row.get("prompt"), str) and row["prompt"]:
                return _prompt(row["prompt"], most)
            messages = row.get("messages")
            if messages and isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
                return Prompt("\n\n".join(str(one.get("content") or "") for one in messages), messages, most)
            turns = row.get("conversations")
            if isinstance(turns, list):
                opened = [t["value"] for t in turns[:1] if isinstance(t, dict) and isinstance(t.get("value"), str)]
                return _prompt(opened[0], most) if opened and opened[0] else None
    raise OptionError(f'--dataset {file}: entry {number} is no object with "prompt" or "messages"')


def _prompt(text: str, max_tokens: int) -> Prompt:
    return Prompt(text, [{"role": "user", "content": text}], max_tokens)
