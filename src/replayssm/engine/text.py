"""From tokens to text as it grows: whole characters only, and nothing that may turn out to be a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one output. `push` each token, `finish` at the end; what they return, joined, is `text`.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: texts that end the output, also when they begin in one token and end in another, or lie within one.

    Attributes:
        text: what was handed out.
        stopped: the stop text that was found, the one that begins first, or None. Nothing follows it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that is certain after one more token; often empty. Without `may_stop`, stop texts are text."""
        if self.stopped is not None:
            return ""
        self._tokens.append(token)
        return self._emit(self._stream.step(self._tokenizer, token) or "", final=False, may_stop=may_stop)

    def finish(self) -> str:
        """What was held back, when the output has ended otherwise. Bytes that are no character are shown as U+FFFD."""
        if self.stopped is not None:
            return ""
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return self._emit(whole[len(self.text) + len(self._held) :], final=True)

    def _emit(self, new: str, final: bool, may_stop: bool = True) -> str:
        self._held += new
        stops = self._stop if may_stop else ()
        found = [(at, stop) for stop in stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            out, self._held = self._held[:at], ""
        else:
            keep = 0 if final else max((overlap(self._held, stop) for stop in stops), default=0)
            cut = len(self._held) - keep
            out, self._held = self._held[:cut], self._held[cut:]
        self.text += out
        return out


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
