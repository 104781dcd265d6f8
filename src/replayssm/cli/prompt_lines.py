"""Lines of `generate --jsonl`: from an object to a prompt with its parameters, and from an output back to an object."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from replayssm.cli.generate_request import Line, sampling_params
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Completion, RequestOutput
from replayssm.errors import OptionError, PromptError

PARAMETERS = tuple(field.name for field in fields(SamplingParams))
RESULTS = (
    "line", "error", "prompt_tokens", "text", "token_ids", "finish_reason", "cached_tokens", "ttft", "seconds",
    "drafted", "drafts_kept", "outputs",
)  # fmt: skip


class Asked(NamedTuple):
    """What one line asks. `kept` are its other keys, which come back in the result."""

    prompt: str | list[int]
    params: SamplingParams
    kept: dict[str, Any]


def read_object(line: Line) -> dict[str, Any]:
    """The object of a line. Raises `PromptError` where there is none."""
    try:
        found = json.loads(line.raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(f"the line is not UTF-8: byte {error.start} is 0x{line.raw[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the line is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise PromptError(f'the line is no object, as in {{"prompt": "Once"}}, but {_short(found)}')
    return found


def kept_keys(found: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that say nothing to the engine and do not hide a part of the result."""
    return {key: value for key, value in found.items() if key not in (*PARAMETERS, *RESULTS, "prompt")}


def asked_of(found: Mapping[str, Any], defaults: Mapping[str, Any], number: int) -> Asked:
    """Check an object. A parameter that is null is not given; without a seed it gets one of its own, by its number.

    Raises `PromptError` or `OptionError`.
    """
    kept = kept_keys(found)
    for key in found:
        if key in RESULTS:
            raise OptionError(f"{key!r} is a key of the results; give it another name")
    for key in kept:
        near = difflib.get_close_matches(key, (*PARAMETERS, "prompt"), n=1, cutoff=0.8)
        if near:
            raise OptionError(f"unknown field {key!r}; did you mean {near[0]!r}?")
    own = {name: found[name] for name in PARAMETERS if found.get(name) is not None}
    if "logit_bias" in own:
        own["logit_bias"] = _bias(own["logit_bias"])
    _check_types(own)
    given = {**defaults, **own}
    if "seed" not in own:
        given["seed"] = (defaults.get("seed", 0) + number) % 2**63
    return Asked(_prompt(found), sampling_params(given), kept)


def result_of(output: RequestOutput, line: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the results."""
    result: dict[str, Any] = {**kept, "line": line, "prompt_tokens": len(output.prompt_token_ids)}
    errors = [one.error for one in output.outputs if one.error is not None]
    if len(output.outputs) == 1:
        result |= _completion(output.outputs[0])
    else:
        result["outputs"] = [_completion(one) for one in output.outputs]
    result["cached_tokens"] = output.cached_tokens
    if errors:
        result["error"] = errors[0]
    return result


def _completion(one: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
    if one.logprobs:
        found["logprobs"] = [logprob._asdict() for logprob in one.logprobs]
    drafts = {"drafted": one.drafted, "drafts_kept": one.drafts_kept}
    return found | {"ttft": one.ttft, "seconds": one.seconds} | drafts


def _prompt(found: Mapping[str, Any]) -> str | list[int]:
    prompt = found.get("prompt")
    if prompt is None:
        raise PromptError('the line has no "prompt", a text or a list of token ids')
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is half a character at {error.start}") from error
        return prompt
    if isinstance(prompt, list) and all(_is_int(token) for token in prompt):
        return prompt
    raise PromptError(f"prompt {_short(prompt)} is neither a text nor a list of token ids")


def _bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict) or not all(key.isascii() and key.isdecimal() for key in value):
        raise OptionError(f"logit_bias {_short(value)} is no object of token ids and numbers")
    return {int(key): bias for key, bias in value.items()}


def _check_types(own: Mapping[str, Any]) -> None:
    """Those that `SamplingParams` takes for granted."""
    if not isinstance(own.get("ignore_eos", False), bool):
        raise OptionError(f"ignore_eos {_short(own['ignore_eos'])} is neither true nor false")
    stop = own.get("stop", "")
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(text, str) for text in stop)):
        raise OptionError(f"stop {_short(stop)} is neither a text nor a list of texts")
    tokens = own.get("stop_token_ids", [])
    if not isinstance(tokens, list) or not all(_is_int(token) for token in tokens):
        raise OptionError(f"stop_token_ids {_short(tokens)} is no list of token ids")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"
