"""Outputs that follow a grammar: xgrammar says which tokens may come next. Imports it, and torch, on first use."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from replayssm.errors import GrammarError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["json", "json_schema", "regex", "ebnf", "structural_tag"]
MOST_TEXT = 2**16  # characters; time to compile grows faster than the text
MOST_DEPTH = 64  # of a schema, likewise
MOST_BLANKS = 8  # in a row between the parts of a JSON text: a model may want blanks for ever
CACHE_BYTES = 2**27


@dataclass(frozen=True)
class Grammar:
    """What an output must be. Raises `GrammarError` for a text that is too long.

    Attributes:
        kind: "json" (any object), "json_schema", "regex", "ebnf" (GBNF with a rule "root"), "structural_tag" (see
            xgrammar).
        text: the schema as JSON, the expression, the rules, the tag as JSON; empty for "json".
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise GrammarError(f"grammar kind {self.kind!r} is unknown; use one of {', '.join(get_args(Kind))}")
        if len(self.text) > MOST_TEXT:
            raise GrammarError(f"grammar of {len(self.text)} characters exceeds {MOST_TEXT}; simplify it")
        if self.kind in ("json_schema", "structural_tag") and _depth(self.text) > MOST_DEPTH:
            raise GrammarError(f"grammar is nested deeper than {MOST_DEPTH} levels; flatten it")


class Grammars:
    """Compiles grammars for one tokenizer. Any thread may call it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocabulary: size of the model's logits.
        stops: tokens that end a text by the model's own account.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stops: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._stops = tokenizer, vocabulary, sorted(stops)
        self._compiler: Any = None
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar, ignore_eos: bool = False) -> Matcher:
        """A matcher at the start of an output. Raises `GrammarError` for a grammar that cannot be compiled or met."""
        import xgrammar

        try:
            compiled = self._compile(grammar)
            ends: dict[str, Any] = {"override_stop_tokens": self._stops}
            if ignore_eos or not self._stops:
                ends = {"terminate_without_stop_token": True}
            found = Matcher(xgrammar.GrammarMatcher(compiled, **ends))
        except (RuntimeError, ValueError, TypeError) as error:  # xgrammar has no class of its own for most mistakes
            words = " ".join(str(error).split()).partition(": ")[2] or str(error)
            raise GrammarError(f"the {grammar.kind} grammar cannot be used: {words[:300]}") from None
        if not found.possible(self._vocabulary):
            raise GrammarError(f"the {grammar.kind} grammar allows no text that this tokenizer can write; loosen it")
        return found

    def _compile(self, grammar: Grammar) -> Any:
        import xgrammar

        with self._lock:
            if self._compiler is None:
                info = xgrammar.TokenizerInfo.from_huggingface(
                    self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=self._stops or None
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        compiler, text = self._compiler, grammar.text
        if grammar.kind == "json":
            return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MOST_BLANKS)
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(text, max_whitespace_cnt=MOST_BLANKS)
        if grammar.kind == "regex":
            return compiler.compile_regex(text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(text)
        return compiler.compile_structural_tag(text)


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._failure: Exception | None = None

    def fork(self) -> Matcher:
        """Another output that stands at the same place."""
        return Matcher(self._matcher.fork())

    def possible(self, vocabulary: int) -> bool:
        """Whether some token may come next."""
        return not bool(forbidden([(0, self)], 1, vocabulary, "cpu").all())

    def accept(self, token: int) -> bool:
        """Move on. True when the output is complete and no end token is due. Raises `GrammarError` for a token that
        does not fit, which happens only where none does."""
        if self._failure is not None:
            raise GrammarError(f"the grammar failed: {self._failure}")
        if not self._matcher.accept_token(token):
            raise GrammarError("no token is left that fits the grammar (does logit_bias forbid them all?)")
        return bool(self._matcher.is_terminated())

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write which tokens may come to a row of bits. What fails here is reported by the next `accept`: the other
        rows of the step go on."""
        try:
            self._matcher.fill_next_token_bitmask(bitmask, row)
        except Exception as error:
            self._failure = error
            bitmask[row] = -1


def forbidden(matchers: Sequence[tuple[int, Matcher]], rows: int, vocabulary: int, device: Any) -> Tensor:
    """[rows, vocabulary] bool: what the (row, matcher) pairs rule out; other rows are free."""
    import torch
    import xgrammar

    bits = xgrammar.allocate_token_bitmask(len(matchers), vocabulary)
    for i, (_, matcher) in enumerate(matchers):
        matcher.fill(bits, i)
    at = torch.tensor([row for row, _ in matchers])
    bits, at = bits.to(device), at.to(device)
    places = torch.arange(32, dtype=torch.int32, device=device)
    ruled_out = ((bits[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary] == 0
    mask = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
    return mask.index_copy_(0, at, ruled_out)


def _depth(text: str) -> int:
    """Nesting of a JSON text. Raises `GrammarError` where it is none."""
    try:
        level = [json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the grammar is not JSON: {error}") from None
    depth = 0
    while level and depth <= MOST_DEPTH:
        depth += 1
        inner = [x for one in level if isinstance(one, (dict, list)) for x in _values(one)]
        level = inner
    return depth


def _values(one: dict[str, Any] | list[Any]) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else one
