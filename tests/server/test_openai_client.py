"""The official client against the server, streaming and not."""

from __future__ import annotations

import json

import openai
import pytest

from replayssm.engine.llm import LLM
from replayssm.engine.params import SamplingParams
from tests.server.common import ENGINE, bytes_model, exactly, serving

PROMPT = "In the beginning"
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


@pytest.fixture
def client(server):
    with server.openai() as made:
        yield made


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other/model")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_completion_is_what_the_engine_says():
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=20, logprobs=2, ignore_eos=True)
    with LLM(bytes_model(), **ENGINE) as llm:
        (expected,) = llm.generate(PROMPT, params)
    with serving() as running, running.openai() as client:
        found = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0.8, top_p=0.9, seed=11, max_tokens=20, logprobs=2,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    choice = found.choices[0]
    assert choice.text == expected.text
    assert choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-5)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 20
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (16, 20, 36)


def test_a_stream_is_the_whole_in_parts(client):
    asked = dict(model="tiny", prompt=PROMPT, temperature=1, seed=5, max_tokens=30, logprobs=1)
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert [x for part in parts for x in part.tokens] == whole.choices[0].logprobs.tokens
    assert [x for part in parts for x in part.text_offset] == whole.choices[0].logprobs.text_offset
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_prompts_and_outputs(client, server):
    asked = dict(model="tiny", prompt=["one", "two"], n=2, seed=3, max_tokens=8, echo=True)
    found = client.completions.create(**asked)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in found.choices]
    assert all(text.startswith("one") for text in texts[:2])
    assert all(text.startswith("two") for text in texts[2:])
    assert texts[0] != texts[1], "outputs with one seed must differ"
    assert found.usage.prompt_tokens == 6
    streamed = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    ids = [server.call("/tokenize", {"prompt": text}).json["tokens"] for text in ("AB", "C")]
    tokens = client.completions.create(model="tiny", prompt=ids, max_tokens=3, seed=1, echo=True)
    assert [choice.text[:n] for choice, n in zip(tokens.choices, (2, 1), strict=True)] == ["AB", "C"]


def test_chat_whole_and_streamed(client):
    asked = dict(model="tiny", messages=ASK, seed=4, max_completion_tokens=25, logprobs=True, top_logprobs=3)
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert whole.usage.completion_tokens <= 25
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].logprob >= token.logprob - 1e-6 for token in tokens)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == message.content
    assert chunks[-1].usage == whole.usage
    streamed = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [token.bytes for token in streamed] == [token.bytes for token in tokens]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], abs=1e-5)


def test_roles_parts_and_the_developer(client, server):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    found = server.call("/tokenize", {"messages": messages}).json
    text = server.call("/detokenize", {"tokens": found["tokens"]}).json["prompt"]
    assert text == "Be brief.\n\nUser: Hi\n\nAssistant: Yes?\n\nUser: Go on\n\nAssistant:"
    usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert usage.prompt_tokens == found["count"] == len(text)


def test_bias_stop_and_penalties(client, server):
    (a,) = server.call("/tokenize", {"prompt": "a"}).json["tokens"]
    only_a = {"logit_bias": {str(a): 100}, "max_tokens": 6, "temperature": 0}
    biased = client.completions.create(model="tiny", prompt="x", **only_a)
    assert biased.choices[0].text == "a" * 6
    banned = client.completions.create(model="tiny", prompt="x", logit_bias={str(a): -100}, max_tokens=20, seed=1)
    assert "a" not in banned.choices[0].text
    stopped = client.completions.create(model="tiny", prompt="x", stop=["aaa", "zz"], **only_a)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    varied = client.completions.create(model="tiny", prompt="x", frequency_penalty=2, presence_penalty=2, **only_a)
    assert varied.usage.completion_tokens == 6
    ended = client.completions.create(model="tiny", prompt="x", logit_bias={"256": 100}, temperature=0, max_tokens=9)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    going = client.completions.create(
        model="tiny", prompt="x", logit_bias={"256": 100}, temperature=0, max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert (going.choices[0].finish_reason, going.usage.completion_tokens) == ("length", 9)


def test_structured_outputs(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    found = client.chat.completions.create(model="tiny", messages=ASK, response_format=wanted, seed=2, max_tokens=150)
    answer = json.loads(found.choices[0].message.content)
    assert isinstance(answer["ok"], bool)
    assert answer["n"] in range(10)
    some = client.chat.completions.create(
        model="tiny", messages=ASK, response_format={"type": "json_object"}, seed=1, max_tokens=200
    )
    if some.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(some.choices[0].message.content), dict)
    assert some.choices[0].message.content.lstrip().startswith("{")
    rules = client.completions.create(
        model="tiny", prompt="x", max_tokens=20,
        extra_body={"response_format": {"type": "grammar", "grammar": 'root ::= ("yes" | "no")'}},
    )  # fmt: skip
    assert rules.choices[0].text in ("yes", "no")
    streamed = client.completions.create(
        model="tiny", prompt="x", max_tokens=40, stream=True, n=2, extra_body={"response_format": exactly("Grüße 🙂")}
    )
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Grüße 🙂"] * 2


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "greater_than_equal"),
        ({"top_p": 0}, "top_p", "greater_than"),
        ({"n": 0}, "n", "greater_than_equal"),
        ({"n": 2, "temperature": 0}, "n", None),
        ({"max_tokens": 0}, "max_tokens", "greater_than_equal"),
        ({"extra_body": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens", None),
        ({"logit_bias": {"257": 1}}, "logit_bias", None),
        ({"logit_bias": {"a": 1}}, "logit_bias", None),
        ({"logit_bias": {"1": 101}}, "logit_bias", None),
        ({"extra_body": {"stop_token_ids": [999]}}, "stop_token_ids", None),
        ({"extra_body": {"top_k": 258}}, "top_k", None),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"stop": ["a"] * 17}, "stop", "too_long"),
        ({"best_of": 3}, "best_of", None),
        ({"suffix": "x"}, "suffix", "unsupported"),
        ({"echo": True, "logprobs": 1}, "echo", "unsupported"),
        ({"prompt": []}, "prompt", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": ["a", ""]}, "prompt", None),
        ({"prompt": [[65], []]}, "prompt", None),
        ({"prompt": [65, 257]}, "prompt", "invalid_token"),
        ({"prompt": "a" * 256}, "prompt", "context_length_exceeded"),
        ({"prompt": [65] * 256}, "prompt", "context_length_exceeded"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"extra_body": {"response_format": {"type": "regex", "regex": "["}}}, "response_format", "invalid_grammar"),
        ({"extra_body": {"response_format": {"type": "regex"}}}, "response_format", "missing"),
        ({"extra_body": {"response_format": {"type": "yaml"}}}, "response_format.type", "literal_error"),
        ({"model": "gpt"}, "model", "model_not_found"),
    ],
)
def test_refusals_name_the_parameter(client, change, param, code):
    wrong = {"model": "tiny", "prompt": "x", **change}
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**wrong)
    error = refused.value
    assert error.status_code == (404 if code == "model_not_found" else 400)
    assert error.param == param
    assert error.code == code
    assert param.split(".")[0] in error.body["message"] or code in ("invalid_grammar", "missing")


def test_chat_refusals_name_the_parameter(client):
    for change, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs.chat_template"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{"model": "tiny", "messages": ASK, **change})
        assert refused.value.param.startswith(param), change


def test_cached_tokens_are_told(gdn):
    with gdn.openai() as client:
        ask = dict(
            model="tiny", prompt="It is a truth universally acknowledged, that " * 8, max_tokens=4, temperature=0
        )
        first, second = client.completions.create(**ask), client.completions.create(**ask)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert first.choices[0].text == second.choices[0].text
