"""From a client's fields to `SamplingParams`, each refusal with the field's name."""

from __future__ import annotations

import json
from typing import Any

from replayssm.engine.grammar import Grammar
from replayssm.engine.params import SamplingParams
from replayssm.errors import ReplayError
from replayssm.server.errors import ApiError, refused
from replayssm.server.protocol import ResponseFormat, Sampling

SAME = (
    "n", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "ignore_eos",
)  # fmt: skip


def sampling_params(
    body: Sampling, max_tokens: int, logprobs: int | None, grammar: Grammar | None, stops: tuple[str, ...] = ()
) -> SamplingParams:
    """Raises `ApiError`. `stops` come besides the client's own."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 keeps all, in vLLM's words
    if body.seed is not None:
        given["seed"] = body.seed % 2**63
    own = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given["stop"] = tuple(dict.fromkeys((*(stop for stop in own if stop), *stops)))
    given["stop_token_ids"] = tuple(body.stop_token_ids or ())
    given["logit_bias"] = {_token(key): value for key, value in (body.logit_bias or {}).items()}
    try:
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)
    except ReplayError as error:
        raise refused(error, {}) from None


def grammar_of(wanted: ResponseFormat | None) -> Grammar | None:
    """What `response_format` asks for; None for plain text. Raises `ApiError`."""
    if wanted is None or wanted.type == "text":
        return None
    try:
        if wanted.type == "json_object":
            return Grammar("json")
        if wanted.type == "regex":
            return Grammar("regex", _needed(wanted, "regex"))
        if wanted.type == "grammar":
            return Grammar("ebnf", _needed(wanted, "grammar"))
        _needed(wanted, "json_schema")
        assert wanted.json_schema is not None
        if wanted.json_schema.schema_ is None:
            raise ApiError(400, "response_format.json_schema has no schema; add one", "response_format", "missing")
        return Grammar("json_schema", json.dumps(wanted.json_schema.schema_))
    except ReplayError as error:
        raise refused(error, {}) from None


def _needed(wanted: ResponseFormat, name: str) -> Any:
    if (value := getattr(wanted, name)) is None:
        message = f"response_format of type {wanted.type!r} needs {name!r} beside its type"
        raise ApiError(400, message, "response_format", "missing")
    return value


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise ApiError(400, f"logit_bias names {ascii(key)[:80]}, which is no token id", "logit_bias")
    return int(key)
