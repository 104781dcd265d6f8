"""Tool calls: read from texts however they are cut, asked for by templates, forced by grammars."""

from __future__ import annotations

import json

import openai
import pytest

from replayssm.server.tools import FORMS, CallReader, form_of
from tests.server.common import exactly, serving, template_file

SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": "Zürich 2", "days": 3}
CALLS = [("weather", ARGUMENTS), ("now", {})]
TEXTS = {
    "qwen_3_5": "<tool_call>\n<function=weather>\n<parameter=city>\nZürich 2\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm_4_7": "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich 2</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    + json.dumps(ARGUMENTS)
    + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "qwen_3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 2", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
}
BY_NAME = {form.name: form for form in FORMS}


def read(form, parts):
    reader, said, calls = CallReader(BY_NAME[form], SCHEMAS), "", []
    for part in parts:
        text, found = reader.feed(part)
        said, calls = said + text, calls + found
    return said + reader.finish(), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_however_the_text_is_cut(form, size):
    text = "Let me <look>.\n\n" + TEXTS[form]
    assert read(form, [text[i : i + size] for i in range(0, len(text), size)]) == ("Let me <look>.", CALLS)


@pytest.mark.parametrize("form", TEXTS)
def test_what_is_no_call_is_said(form):
    start, end = BY_NAME[form].start, BY_NAME[form].end
    for text in (f"a {start}nonsense", f"{start[:-1]}", "a  ", f"{start}", "x < y\n"):
        for size in (1, 100):
            assert read(form, [text[i : i + size] for i in range(0, len(text), size)]) == (
                text.replace(" " + start, start),
                [],
            )
    if form != "glm_4_7":  # there any word is a name
        assert read(form, [f"{start}nonsense{end}"])[1] == []
        assert "nonsense" in read(form, [f"{start}nonsense{end}"])[0]


def test_parallel_calls_can_be_left_out():
    reader = CallReader(BY_NAME["qwen_3"], SCHEMAS, most=1)
    assert [call.name for call in reader.feed(TEXTS["qwen_3"])[1]] == ["weather"]


def test_forms_of_templates():
    assert form_of("no such thing") is None
    assert form_of("{{ tools }}") is None
    for form in FORMS:
        assert form_of("{{ tools }}" + form.mark) is form


HERMES = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}Write <tool_call>JSON</tool_call>.{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}{{ '\n' }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
ASK = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    file = template_file(tmp_path_factory.mktemp("templates"), HERMES)
    with serving(chat_template=file, engine={"context": 512}) as running:
        yield running


def ask(client, stream, **change):
    asked = dict(model="tiny", messages=ASK, tools=TOOLS, seed=1, max_tokens=300, **change)
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    text, calls, reason, ids = "", {}, None, set()
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            calls[call.index] = (call.function.name, json.loads(call.function.arguments))
            ids.add(call.id)
        reason = choice.finish_reason or reason
    assert len(ids) == len(calls)
    return text, [calls[i] for i in range(len(calls))], reason


@pytest.mark.parametrize("stream", [False, True])
def test_calls_through_http(hermes, stream):
    says = exactly("Well.\n" + TEXTS["qwen_3"])
    with hermes.openai() as client:
        assert ask(client, stream, response_format=says) == ("Well.", CALLS, "tool_calls")
        none = ask(client, stream, response_format=says, tool_choice="none")
        assert none == ("Well.\n" + TEXTS["qwen_3"], [], "stop")
        assert ask(client, stream, response_format=says, parallel_tool_calls=False)[1] == CALLS[:1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_cut_within_a_call_ends_with_length(hermes, stream):
    says = exactly(TEXTS["qwen_3"])
    with hermes.openai() as client:
        text, calls, reason = ask(client, stream, response_format=says, max_completion_tokens=30)
        assert (calls, reason) == ([], "length")
        assert text == TEXTS["qwen_3"][:30]
        first = TEXTS["qwen_3"].index("</tool_call>") + len("</tool_call>")
        for more in (0, 20):
            cut = len(TEXTS["qwen_3"][: first + more].encode())
            text, calls, reason = ask(client, stream, response_format=says, max_completion_tokens=cut)
            assert (calls, reason) == (CALLS[:1], "length")


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(hermes, stream):
    with hermes.openai() as client:
        named = ask(client, stream, tool_choice={"type": "function", "function": {"name": "now"}})
        assert named[1]
        assert {name for name, _ in named[1]} == {"now"}
        required = (
            ask(client, stream, tool_choice="required", seed=2)
            if False
            else ask(client, stream, tool_choice="required")
        )
        assert required[1] or required[2] == "length"
        assert {name for name, _ in required[1]} <= {"now", "weather"}


def test_refusals(hermes):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
    with hermes.openai() as client:
        for change, param in (
            ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
            ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
            ({"tools": [bad], "tool_choice": "required"}, "tools"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**{"model": "tiny", "messages": ASK, "tools": TOOLS, **change})
            assert refused.value.param == param, change


def test_a_conversation_with_calls_in_it_reaches_the_template(hermes):
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]  # fmt: skip
    tokens = hermes.call("/tokenize", {"messages": messages}).json["tokens"]
    text = hermes.call("/detokenize", {"tokens": tokens}).json["prompt"]
    assert text == "user: Weather?\nassistant: [weather Zürich 2]\ntool: sunny\n"
    with hermes.openai() as client:
        assert client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=3).choices


def test_a_template_that_breaks_is_a_refusal(tmp_path):
    with serving(chat_template=template_file(tmp_path, "{{ messages[9].content.x.y }}")) as running:
        reply = running.call("/v1/chat/completions", {"messages": ASK})
        assert reply.status == 400
        assert reply.error["param"] == "messages"
        running.wait_idle()
