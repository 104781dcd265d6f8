"""`/v1/completions` and `/v1/chat/completions`: check, submit, answer."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response
from starlette.types import Receive

from replayssm.engine.grammar import Grammar
from replayssm.server.answers import Answer, ChatAnswer, CompletionAnswer
from replayssm.server.errors import ApiError
from replayssm.server.protocol import ChatBody, CompletionBody, DetokenizeBody, NamedTool, Sampling, TokenizeBody
from replayssm.server.sampling import grammar_of, sampling_params
from replayssm.server.service import Service
from replayssm.server.stream import EventStream, whole
from replayssm.server.tools import CallReader, Form, forced

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


async def complete(service: Service, body: CompletionBody, receive: Receive) -> Response:
    """Answer `/v1/completions`. Raises `ApiError`."""
    service.check_model(body.model)
    _check_stream(body)
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out", "suffix", "unsupported")
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise ApiError(400, f"best_of {body.best_of} differs from n = {n}, which is not supported", "best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400, "echo with logprobs asks for those of the prompt, which are not kept", "echo", "unsupported"
        )
    prompts = _prompts(body)
    service.room(len(prompts) * n)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    tokens = [await service.encode(one, True) if isinstance(one, str) else one for one in prompts]
    _check_lengths(service, tokens, "prompt")
    echo = None
    if body.echo:
        echo = [one if isinstance(one, str) else _decode(service, one) for one in prompts]
    params = sampling_params(body, max_tokens, body.logprobs, grammar_of(body.response_format))
    requests = [await service.make(one, params, {"max_tokens": "max_tokens"}, "prompt") for one in tokens]
    ticket = service.open(requests)
    return await _answer(CompletionAnswer(service, ticket, _usage(body), echo), bool(body.stream), receive)


async def chat(service: Service, body: ChatBody, receive: Receive) -> Response:
    """Answer `/v1/chat/completions`. Raises `ApiError`."""
    service.check_model(body.model)
    _check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    n = body.n or 1
    service.room(n)
    tools = body.tools if body.tool_choice != "none" else None
    calls_wanted = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    if calls_wanted and not tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", "tool_choice")
    rendered = service.chat.render(body.messages, tools, body.chat_template_kwargs)
    grammar = grammar_of(body.response_format)
    if calls_wanted:
        grammar = _forced(rendered.form, body, grammar)
    tokens = await service.encode(rendered.text, False, "messages")
    _check_lengths(service, [tokens], "messages")
    named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None:
        max_tokens = max(1, service.context - len(tokens))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, max_tokens, logprobs, grammar, service.chat.stops)
    request = await service.make(tokens, params, {"max_tokens": named}, "messages")
    readers = None
    if rendered.form is not None:
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools or ()}
        most = 1 if body.parallel_tool_calls is False else None
        readers = [CallReader(rendered.form, schemas, most) for _ in range(n)]
    ticket = service.open([request])
    return await _answer(ChatAnswer(service, ticket, _usage(body), readers), bool(body.stream), receive)


async def _answer(answer: Answer, stream: bool, receive: Receive) -> Response:
    if stream:
        return EventStream(answer.ticket, answer.events())
    return await whole(answer.ticket, receive, answer.build)


def _usage(body: Sampling) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _check_stream(body: Sampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options has no effect without stream: true; drop it", "stream_options")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """One or several; a list of numbers is one."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give at least one token or text", "prompt")
    return list(prompt)


def _check_lengths(service: Service, prompts: list[list[int]], param: str) -> None:
    """The engine says the same, but not all of them before the first one is made."""
    for i, tokens in enumerate(prompts):
        which = f"{param} {i}" if len(prompts) > 1 else param
        if not tokens:
            raise ApiError(400, f"{which} is empty; give at least one token", param)
        if len(tokens) >= service.engine.context:
            raise ApiError(
                400, f"{which} has {len(tokens)} tokens and leaves no room for an answer in a context of "
                f"{service.engine.context}; shorten it", param, "context_length_exceeded",
            )  # fmt: skip
        wrong = [token for token in tokens if token >= service.engine.vocabulary]
        if wrong:
            raise ApiError(
                400, f"{which} has token {wrong[0]}, outside 0…{service.engine.vocabulary - 1}", param, "invalid_token"
            )


def _decode(service: Service, tokens: list[int]) -> str:
    return str(service.engine.tokenizer.decode(tokens, skip_special_tokens=False))


def _forced(form: Form | None, body: ChatBody, grammar: Grammar | None) -> Grammar:
    if grammar is not None:
        raise ApiError(
            400, "response_format contradicts tool_choice, which asks for a call; drop one", "response_format"
        )
    if form is None:
        raise ApiError(
            400, "how the model writes tool calls is not known from its chat template, so none can be forced; use "
            "tool_choice 'auto'", "tool_choice", "unsupported",
        )  # fmt: skip
    return forced(form, body.tools or [], body.tool_choice, body.parallel_tool_calls is not False)


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Answer `/tokenize`. Raises `ApiError`."""
    service.check_model(body.model)
    assert service.desk
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if body.messages is not None:
        text, special = service.chat.render(body.messages).text, False
    else:
        assert body.prompt is not None
        text, special = body.prompt, body.add_special_tokens
    tokens = await service.encode(text, special)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.context}


def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """Answer `/detokenize`. Raises `ApiError`."""
    service.check_model(body.model)
    assert service.desk
    vocabulary = service.engine.vocabulary
    if wrong := [token for token in body.tokens if token >= vocabulary]:
        raise ApiError(400, f"token {wrong[0]} is outside 0…{vocabulary - 1}", "tokens", "invalid_token")
    return {"prompt": _decode(service, body.tokens)}
