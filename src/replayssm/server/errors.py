"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from replayssm.errors import GrammarError, PromptError, ReplayError

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MOST_SHOWN = 300  # characters of what a client sent, in a message


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: the value, the limit and the remedy.
        param: the offending field.
        code: a word for programs.
        retry: seconds after which to try again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry is None else {"retry-after": str(max(1, math.ceil(retry)))}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def body(self) -> dict[str, Any]:
        """What a client reads."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The same as a response."""
        return JSONResponse(self.body(), self.status, self.headers)


def refused(error: ReplayError, renamed: Mapping[str, str], param: str | None = None) -> ApiError:
    """What the engine refuses. Its messages begin with the field; `renamed` says what clients call it."""
    message = str(error)
    if isinstance(error, PromptError):
        too_long = "leaves no room" in message
        return ApiError(400, message, param or "prompt", "context_length_exceeded" if too_long else None)
    if isinstance(error, GrammarError):
        return ApiError(400, message, param or "response_format", "invalid_grammar")
    word, _, rest = message.partition(" ")
    name = renamed.get(word, word)
    return ApiError(400, f"{name} {rest}", name if name.isidentifier() else param)


def validation(details: list[Any], body: Any) -> ApiError:
    """The first thing that is wrong with a body, in pydantic's account of it.

    Where a field may be of several types, there is one account for each; that of the type which it has says more.
    """
    first = _where(details[0], body)
    about = [one for one in details if _where(one, body)[: len(first)] == first]
    found = next((one for one in about if not one["type"].endswith("_type")), details[0])
    where = _where(found, body)
    if found["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {found.get('ctx', {}).get('error', found['msg'])}", None, "json")
    param = ".".join(where)[:MOST_SHOWN] or None
    if found["type"] == "missing" and not where:
        return ApiError(400, "the request has no JSON body; send one with content-type application/json", None, "json")
    if found["type"] == "extra_forbidden":
        return ApiError(400, f"{param!a} is no parameter of this endpoint; leave it out", param, "unknown_parameter")
    message = f"{param or 'the body'}: {found['msg']}"
    shown = ascii(found.get("input"))
    if found["type"] == "unicode":
        param = found["ctx"]["param"].encode(errors="replace").decode()[:MOST_SHOWN]
        return ApiError(400, f"{param} is not Unicode text; half of a surrogate pair is in it", param, "unicode")
    if found["type"] != "missing":
        message += f", got {shown if len(shown) <= MOST_SHOWN else shown[:MOST_SHOWN] + '…'}"
    return ApiError(400, message, param, found["type"])


def _where(detail: Any, body: Any) -> list[str]:
    """The path of a field; pydantic's names of types in it are left out."""
    path, at = [], body
    places = list(detail["loc"])[1:] if detail["loc"][:1] == ("body",) else list(detail["loc"])
    for i, place in enumerate(places):
        inside = isinstance(at, list) and isinstance(place, int) and place < len(at)
        if inside or (isinstance(at, dict) and place in at):
            at = at[place]
        elif not (i == len(places) - 1 and detail["type"] == "missing"):
            continue
        path.append(str(place))
    return path
