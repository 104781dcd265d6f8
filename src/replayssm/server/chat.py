"""Messages to a prompt, by the model's chat template, a file's, or a plain one for models that have none."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from replayssm.errors import OptionError
from replayssm.server.errors import MOST_SHOWN, ApiError
from replayssm.server.protocol import Message, Tool
from replayssm.server.tools import Form, form_of

# For base models: turns of a dialogue, which the next "User:" ends.
PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' or m.tool_calls %}{{ raise_exception('the plain template knows no calls') }}{% endif %}"
    "{% if m.role == 'system' %}{{ m.content }}{% else %}{{ m.role | capitalize }}: {{ m.content }}{% endif %}"
    "{{ '\n\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOPS = ("\nUser:",)


class Rendered(NamedTuple):
    """A prompt's text, and how the model writes tool calls, where tools were given and it is known."""

    text: str
    form: Form | None


class Chat:
    """Renders messages.

    Args:
        tokenizer: of transformers.
        file: with a Jinja template instead of the tokenizer's.

    Attributes:
        source: where the template is from, for people.
        stops: texts that end an answer, besides the model's own end.
    """

    def __init__(self, tokenizer: Any, file: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._template: str | None = None
        self.stops: tuple[str, ...] = ()
        if file is not None:
            try:
                self._template, self.source = file.read_text(encoding="utf-8"), str(file)
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(f"chat_template {file} cannot be read: {error}") from error
        elif tokenizer.chat_template:
            self.source = "the model's"
        else:
            self._template, self.source, self.stops = PLAIN, "none in the model; plain turns of a dialogue", PLAIN_STOPS
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, more: dict[str, Any] | None = None
    ) -> Rendered:
        """Raises `ApiError` for what the template cannot say."""
        if taken := sorted(self._reserved & (more or {}).keys()):
            message = f"chat_template_kwargs may not set {taken[0]!r}"
            raise ApiError(400, message, f"chat_template_kwargs.{taken[0]}")
        described = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
        template = self._template or self._tokenizer.get_chat_template(tools=described)
        if described and "tools" not in template:
            raise ApiError(400, "the model's chat template takes no tools; leave them out", "tools", "unsupported")
        turns = [_turn(message, i, "developer" in template) for i, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tools=described, chat_template=template, add_generation_prompt=True, tokenize=False, **more or {}
            )
        except Exception as error:  # a template may raise anything at what it does not like
            message = f"the chat template refuses these messages: {str(error)[:MOST_SHOWN]}"
            raise ApiError(400, message, "messages") from None
        return Rendered(text, form_of(template) if described else None)


def _turn(message: Message, index: int, knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: contents are texts, arguments objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise ApiError(400, f"messages.{index} has no content", f"messages.{index}.content", "missing")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
