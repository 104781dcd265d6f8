"""Tool calls in the texts of models: which form a chat template asks for, and calls read from the text as it grows."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from replayssm.engine.grammar import Grammar
from replayssm.engine.text import overlap
from replayssm.errors import ReplayError
from replayssm.server.errors import ApiError, refused
from replayssm.server.protocol import NamedTool, Tool

Schemas = dict[str, dict[str, Any]]  # of each tool's parameters


class Call(NamedTuple):
    """One call; `arguments` is JSON."""

    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """In OpenAI's shape, with an index in streams."""
        function = {"name": self.name, "arguments": self.arguments}
        made: dict[str, Any] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        return made if index is None else {"index": index, **made}


@dataclass(frozen=True)
class Form:
    """How a family of models writes calls.

    Attributes:
        name: xgrammar's, for calls that must be made.
        mark: what shows in a chat template that it is this form.
        start, end: around one call.
        read: what is between them; None when that is no call.
        noise: around all calls, no part of the answer.
    """

    name: str
    mark: str
    start: str
    end: str
    read: Callable[[str, Schemas], Call | None]
    noise: tuple[str, ...] = ()


def _read_json(text: str, schemas: Schemas) -> Call | None:
    try:
        found = json.loads(text)
        return _call(found["name"], found.get("arguments", found.get("parameters", {})))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _read_xml(text: str, schemas: Schemas) -> Call | None:
    found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", text, re.DOTALL)
    if found is None:
        return None
    name, body = found[1].strip(), found[2]
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
    return _call(name, {key.strip(): _typed(value, schemas.get(name, {}), key.strip()) for key, value in pairs})


def _read_pairs(text: str, schemas: Schemas) -> Call | None:
    name = text.partition("<arg_key>")[0].strip()
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    if not name:
        return None
    return _call(name, {key.strip(): _typed(value, schemas.get(name, {}), key.strip()) for key, value in pairs})


def _read_section(text: str, schemas: Schemas) -> Call | None:
    head, mark, body = text.partition("<|tool_call_argument_begin|>")
    name = head.strip().removeprefix("functions.").rpartition(":")[0]
    try:
        return _call(name, json.loads(body)) if mark and name else None
    except (ValueError, RecursionError):
        return None


def _call(name: Any, arguments: Any) -> Call | None:
    if isinstance(arguments, str):  # JSON within JSON
        arguments = json.loads(arguments)
    good = isinstance(name, str) and isinstance(arguments, dict)
    return Call(name, json.dumps(arguments, ensure_ascii=False)) if good else None


def _typed(value: str, schema: dict[str, Any], key: str) -> Any:
    """A parameter that is written without quotes: a text where the schema says so, else JSON if it is any."""
    properties = schema.get("properties")
    about = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(about, dict) and about.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


FORMS = (
    Form("qwen_3_5", "<function=", "<tool_call>", "</tool_call>", _read_xml),
    Form("glm_4_7", "<arg_key>", "<tool_call>", "</tool_call>", _read_pairs),
    Form(
        "kimi", "<|tool_call_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", _read_section,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Form("qwen_3", "<tool_call>", "<tool_call>", "</tool_call>", _read_json),
)  # fmt: skip


def form_of(template: str) -> Form | None:
    """What a chat template asks a model to write; None where it takes no tools or none of the known forms."""
    if "tools" not in template:
        return None
    return next((form for form in FORMS if form.mark in template), None)


def forced(form: Form, tools: Sequence[Tool], choice: Any, parallel: bool) -> Grammar:
    """A grammar of outputs that call a tool: any of them, or the one that is named. Raises `ApiError`."""
    import xgrammar

    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            message = f"tool_choice names {choice.function.name!r}; the tools are {', '.join(names)}"
            raise ApiError(400, message, "tool_choice")
        choice = choice.model_dump()
    asked: list[Any] = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        tag = xgrammar.get_model_structural_tag(
            form.name, tools=asked, tool_choice=choice, reasoning="disabled", parallel_tool_calls=parallel
        )
        return Grammar("structural_tag", tag.model_dump_json())
    except ReplayError as error:
        raise refused(error, {}) from None
    except Exception as error:
        raise ApiError(400, f"tools cannot be turned into a grammar: {str(error)[:300]}", "tools") from None


@dataclass
class CallReader:
    """Parts a text that grows into what is said and the calls in it.

    What cannot be read as a call is said as it is. White space around calls is dropped.
    """

    form: Form
    schemas: Schemas = field(default_factory=dict)
    most: int | None = None
    calls: int = 0
    _held: str = ""
    _inside: bool = False

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """What is certain after more text."""
        self._held += text
        said, calls = list[str](), list[Call]()
        while True:
            if self._inside:
                body, mark, rest = self._held.partition(self.form.end)
                if not mark:
                    return "".join(said), calls
                self._held, self._inside = rest, False
                call = self.form.read(body, self.schemas)
                if call is None:
                    said.append(self.form.start + body + self.form.end)
                elif self.most is None or self.calls < self.most:
                    self.calls += 1
                    calls.append(call)
                continue
            for noise in self.form.noise:
                self._held = self._held.replace(noise, "")
            before, mark, rest = self._held.partition(self.form.start)
            if not mark:
                said.append(self._certain())
                return "".join(said), calls
            said.append(before.rstrip())
            self._held, self._inside = rest, True

    def finish(self) -> str:
        """What was held back, when the text has ended."""
        held, self._held = self._held, ""
        if self._inside:
            self._inside = False
            return self.form.start + held
        return held if held.strip() or not self.calls else ""

    def _certain(self) -> str:
        """Hold back what may begin a mark, and white space before it."""
        keep = max(overlap(self._held, mark) for mark in (self.form.start, *self.form.noise))
        sure = self._held[: len(self._held) - keep].rstrip()
        if self.calls and not sure.strip():
            sure = ""
        self._held = self._held[len(sure) :]
        return sure
