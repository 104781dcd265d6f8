"""The model behind the endpoints: loaded in the background, asked by many, closed at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from replayssm.engine.core import Engine
from replayssm.engine.grammar import Grammar
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request
from replayssm.engine.stats import EngineStats, RingMeter
from replayssm.errors import GrammarError, OptionError, PromptError, ReplayError
from replayssm.models.loading import LoadedModel
from replayssm.server.chat import Chat
from replayssm.server.desk import Desk, Ticket
from replayssm.server.errors import ApiError, refused
from replayssm.server.options import ServerOptions
from replayssm.state.prefix import PrefixStats

log = logging.getLogger(__name__)

SHORT = 4096  # characters that are tokenized at once, without a thread
GRAMMAR_SECONDS = 20.0  # to compile one
WARM_UP_TOKENS = 20

Phase = Literal["loading", "ready", "failed", "stopped"]


class Service:
    """What endpoints share.

    Args:
        load: makes the model; called once, in a thread.
        name: what the model is called.
        options: of the server.
        engine_options: of the engine.
        on_ready: called with the service when the first request is welcome.
        on_failure: called when the model cannot be loaded; the error is in `failure`.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        name: str,
        options: ServerOptions | None = None,
        engine_options: EngineOptions | None = None,
        on_ready: Callable[[Service], None] | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.options, self.engine_options = options or ServerOptions(), engine_options or EngineOptions()
        self.name = self.options.served_name or name
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self.phase: Phase = "loading"
        self.failure: BaseException | None = None
        self.created = int(time.time())
        self.responses: Counter[tuple[str, int]] = Counter()  # by endpoint and status
        self._desk: Desk | None = None
        self._chat: Chat | None = None
        self._token_bytes: list[bytes] | None = None
        self._longest = 0
        self._task: asyncio.Task[None] | None = None
        self._tokenizing = ThreadPoolExecutor(1, "replayssm-tokenizer")
        self._compiling = ThreadPoolExecutor(2, "replayssm-grammar")

    def start(self) -> None:
        """Begin to load."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await asyncio.to_thread(self._make)
            assert self._desk is not None
            await self._warm_up(self._desk)
        except asyncio.CancelledError:  # the server stops
            raise
        except BaseException as error:
            self.failure, self.phase = error, "failed"
            if self._on_failure is not None:
                self._on_failure()
            return
        self.phase = "ready"
        if self._on_ready is not None:
            self._on_ready(self)

    def _make(self) -> None:
        loaded = self._load()
        if loaded.tokenizer is None:
            raise OptionError("the model has no tokenizer, which a server needs")
        self._chat = Chat(loaded.tokenizer, self.options.chat_template)
        fields = self.engine_options.__dataclass_fields__
        self._desk = Desk(loaded, **{name: getattr(self.engine_options, name) for name in fields})
        self._longest = max(len(self.token_bytes(i)) for i in range(self.engine.vocabulary))

    async def _warm_up(self, desk: Desk) -> None:
        """What is compiled, recorded or imported by a first request is not left to a client's."""
        engine = desk.engine
        tokens = max(1, min(WARM_UP_TOKENS, engine.context - 3))
        params = SamplingParams(max_tokens=tokens, seed=0, logprobs=1, ignore_eos=True)
        ticket = desk.open([engine.make([0, 0], params), engine.make([0], SamplingParams(0, max_tokens=tokens))])
        try:
            while pieces := await ticket.pieces():
                for piece in pieces:
                    if piece.reason == "error":
                        raise RuntimeError(f"the warm-up request failed: {piece.request.error}")
        finally:
            ticket.close()
        await asyncio.to_thread(engine.grammars.matcher, Grammar("json"))
        engine.stats = EngineStats()
        if engine.prefix is not None:
            engine.prefix.clear()
            engine.prefix.stats = PrefixStats()
        engine.runner.meter = RingMeter(engine.slots, engine.options.snapshot_interval)

    async def close(self) -> None:
        """Abort what runs and give the model back."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self.phase = "stopped" if self.phase != "failed" else "failed"
        if self._desk is not None:
            await asyncio.to_thread(self._desk.close)
        for pool in (self._tokenizing, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def healthy(self) -> bool:
        """Whether requests are welcome."""
        return self.phase == "ready" and self.desk.failure is None

    @property
    def desk(self) -> Desk:
        """Raises `ApiError` while there is none."""
        if self._desk is None or self.phase != "ready":
            message = {
                "loading": "the model is being loaded; try again soon",
                "failed": "the model could not be loaded",
            }.get(self.phase, "the server is shutting down")
            raise ApiError(503, message, None, self.phase, 5 if self.phase == "loading" else None)
        return self._desk

    @property
    def engine(self) -> Engine:
        """The engine; while nothing is ready, `ApiError`, but for the warm-up."""
        return self._desk.engine if self._desk is not None else self.desk.engine

    @property
    def chat(self) -> Chat:
        """Raises `ApiError` while there is none."""
        assert self.desk
        assert self._chat is not None
        return self._chat

    @property
    def context(self) -> int:
        """Tokens of the longest request: what the context, or all pages together, can hold."""
        return min(self.engine.context, self.engine.pages.pages * self.engine.pages.page_size)

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for another model than the one that is served."""
        if name is not None and name != self.name:
            shown = name if len(name) < 100 else name[:100] + "…"
            raise ApiError(404, f"model {shown!a} is not served; use {self.name!r}", "model", "model_not_found")

    async def encode(self, text: str, special: bool, param: str = "prompt") -> list[int]:
        """Tokens of a text. Raises `ApiError` for one that is longer than any context, before reading it."""
        least = -(-len(text.encode()) // max(1, self._longest))
        if least > self.engine.context:
            raise ApiError(
                400, f"the prompt has at least {least} tokens, the context {self.engine.context}; shorten it", param,
                "context_length_exceeded",
            )  # fmt: skip
        backend: Any = self.engine.tokenizer.backend_tokenizer

        def tokens() -> list[int]:
            (found,) = backend.encode_batch([text], add_special_tokens=special)
            return list(found.ids)

        if len(text) <= SHORT:
            return tokens()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, tokens)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for."""
        if self._token_bytes is None:
            import xgrammar

            info = xgrammar.TokenizerInfo.from_huggingface(self.engine.tokenizer, vocab_size=self.engine.vocabulary)
            self._token_bytes = [
                piece if isinstance(piece, bytes) else str(piece).encode() for piece in info.decoded_vocab
            ]
        return self._token_bytes[token]

    async def make(self, prompt: Sequence[int], params: SamplingParams, renamed: dict[str, str], param: str) -> Request:
        """A request that can run. Raises `ApiError`."""
        engine = self.engine
        try:
            if params.grammar is None:
                return engine.make(prompt, params)
            work = asyncio.get_running_loop().run_in_executor(self._compiling, engine.make, prompt, params)
            return await asyncio.wait_for(work, GRAMMAR_SECONDS)
        except TimeoutError:
            message = f"the grammar could not be compiled in {GRAMMAR_SECONDS:g} s; simplify it"
            raise ApiError(400, message, "response_format", "invalid_grammar") from None
        except GrammarError as error:
            tools = params.grammar is not None and params.grammar.kind == "structural_tag"
            raise refused(error, renamed, "tools" if tools else None) from None
        except PromptError as error:
            raise refused(error, renamed, renamed["max_tokens"] if "max_tokens" in str(error) else param) from None
        except ReplayError as error:
            raise refused(error, renamed) from None

    def room(self, outputs: int) -> None:
        """Raises `ApiError` when so many more outputs would wait too long, or can never be taken at once."""
        desk = self.desk
        most = desk.engine.plan.slots + self.options.max_queue
        if outputs > most:
            raise ApiError(
                400,
                f"the request asks for {outputs} outputs; at most {most} run and wait at once",
                "n",
                "too_many_outputs",
            )
        if desk.outputs + outputs > most:
            raise ApiError(
                429, f"{desk.outputs} outputs run or wait, at most {most} may; try again later", None, "queue_full",
                desk.wait_estimate(),
            )  # fmt: skip

    def open(self, requests: Sequence[Request]) -> Ticket:
        """Submit. Raises `ApiError` when there is no room, or the engine has stopped."""
        self.room(sum(request.params.n for request in requests))
        try:
            return self.desk.open(requests)
        except RuntimeError as error:
            raise ApiError(503, str(error), None, "engine_stopped") from None
