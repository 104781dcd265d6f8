"""What clients may send, in OpenAI's words and a few of vLLM's. What a field means is checked where it is used."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from replayssm.engine.params import MAX_LOGPROBS, MAX_STOPS

MOST_PROMPTS = 2048
MOST_OUTPUTS = 128

Tokens = list[Annotated[int, Field(ge=0)]]
Stop = str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None


class Strict(BaseModel):
    """Refuses unknown names and wrong types; nothing is converted."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Body(Strict):
    """What is sent to an endpoint. JSON can name half of a surrogate pair, which is no text."""

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, dict) else ():
            try:
                json.dumps([key, value], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise PydanticCustomError("unicode", "no Unicode text", {"param": key}) from None
        return data


class StreamOptions(Strict):
    """`include_usage`: one more chunk with the tokens counted."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Strict):
    """Of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the output must be: `regex` and `grammar` (GBNF, rule "root") go beyond OpenAI's types."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class Sampling(Body):
    """What both endpoints share. From `user` on, fields are accepted and change nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_OUTPUTS)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop = None
    stop_token_ids: Tokens | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionBody(Sampling):
    """`/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MOST_PROMPTS)]
        | Tokens
        | Annotated[list[Tokens], Field(max_length=MOST_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None


class TextPart(Strict):
    """Part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """Of a tool call: `arguments` is JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(Strict):
    """That an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class FunctionTool(Strict):
    """`parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    """That the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    """Of `tool_choice`."""

    name: str


class NamedTool(Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampling):
    """`/v1/chat/completions`. `chat_template_kwargs` go to the model's template; the last two change nothing."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class TokenizeBody(Body):
    """`/tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Tokens


ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
