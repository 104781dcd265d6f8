"""Many prompts in, results out: `LLM` for scripts, `AsyncLLM` for servers and notebooks. Both drive one `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from replayssm.engine.core import Engine, Listener
from replayssm.engine.options import EngineOptions, with_ring
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request, RequestOutput, output_of
from replayssm.errors import OptionError, ReplayError
from replayssm.models.loading import LoadedModel, load_model
from replayssm.models.parallel import ranks_of

Prompt = str | Sequence[int]


class LLM:
    """A model ready to answer many prompts at once.

    Args:
        model: a shipped model's name, a checkpoint folder, or what `replayssm.load_model` returns.
        dtype: of the weights, see `load_model`; not for a model that is loaded already.
        device: torch device, likewise.
        options: fields of `EngineOptions`, by name.

    A context manager: leaving it gives the model back as it was. Ranks that share a model
    (`replayssm.models.parallel`) each have an `LLM` and call it alike.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "float32",
        device: str | None = None,
        **options: Any,
    ) -> None:
        loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, device=device)
        self.engine = Engine(loaded, engine_options(options))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order.

        Args:
            prompts: a text or token ids, or several of them.
            params: for all prompts, or one for each.
            progress: a bar on stderr.

        Raises `OptionError` or `PromptError` before anything runs when one of them cannot be answered.
        """
        asked = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(asked)
        if len(each) != len(asked):
            raise OptionError(f"{len(asked)} prompts, but {len(each)} sets of parameters; give one for each, or one")
        outputs = _Outputs()
        added: list[Request] = []
        try:
            for i, (prompt, one) in enumerate(zip(asked, each, strict=True)):
                try:
                    added.append(self.engine.add(prompt, one, outputs.listener))
                except ReplayError as error:
                    raise type(error)(f"prompt {i}: {error}") if len(asked) > 1 else error from None
            self._run(len(added), outputs, progress)
        except BaseException:
            self.engine.abort_all()
            raise
        return [outputs.of(request) for request in added]

    def _run(self, total: int, outputs: _Outputs, progress: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
            task = bar.add_task("prompts", total=total)
            while not self.engine.idle:
                self.engine.step()
                bar.update(task, completed=outputs.done)

    def close(self) -> None:
        """Give the model back as it was."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncLLM:
    """The same behind `async for`: any number of tasks may stream at once. A thread of its own drives the engine.

    Raises `OptionError` for a model that ranks share: requests would reach them in different orders.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "float32",
        device: str | None = None,
        **options: Any,
    ) -> None:
        loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, device=device)
        if ranks_of(loaded.model) is not None:
            raise OptionError(
                "the model is shared by ranks, which must take requests in one order; use LLM on each of them"
            )
        self.engine = Engine(loaded, engine_options(options))
        self._work = threading.Condition()  # guards the inbox, not the engine: only its thread touches that
        self._inbox: deque[tuple[str, Request, Listener | None]] = deque()
        self._streams: dict[Request, _Stream] = {}
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="replayssm-engine", daemon=True)
        self._thread.start()

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput, None]:
        """What there is of the outputs, after every token; the last one has all finish reasons.

        Leaving the loop early aborts the request. A reader that is slow sees fewer, longer steps; it never holds up
        another one. Raises `OptionError` or `PromptError` when the prompt can never run.
        """
        mine = _Stream(asyncio.get_running_loop())
        request = self.engine.make(prompt, params)
        self._send("add", request, mine)
        try:
            done = False
            while not done:
                await mine.news.wait()
                mine.news.clear()
                done = mine.outputs.complete(request)  # asked first: what comes after it is complete, too
                found = mine.outputs.of(request)
                if not done or any(one.finish_reason == "abort" for one in found.outputs):
                    self._check()  # what was over before the engine closed is handed out all the same
                yield found
        finally:
            self._streams.pop(request, None)
            if not mine.outputs.complete(request):
                with contextlib.suppress(RuntimeError):
                    self._send("abort", request)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The finished outputs of one prompt."""
        async with contextlib.aclosing(self.stream(prompt, params)) as stream:
            found = [output async for output in stream]
        return found[-1]

    def close(self) -> None:
        """Abort what runs, stop the thread and give the model back as it was."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()
        self.engine.close()

    def _send(self, verb: str, request: Request, stream: _Stream | None = None) -> None:
        with self._work:
            self._check()
            if stream is not None:
                self._streams[request] = stream
            self._inbox.append((verb, request, stream.listener if stream is not None else None))
            self._work.notify()

    def _check(self) -> None:
        if self.failure is not None:
            raise RuntimeError("the engine stopped") from self.failure
        if self._closing:
            raise RuntimeError("the engine is closed")

    def _stepped(self) -> None:
        """A step is over; called in the engine's thread."""

    def _drive(self) -> None:
        try:
            while True:
                with self._work:
                    self._work.wait_for(lambda: self._closing or self._inbox or not self.engine.idle)
                    inbox, self._inbox = self._inbox, deque()
                    closing = self._closing
                for verb, request, listener in inbox:
                    if verb == "add":
                        self.engine.submit(request, listener)
                    else:
                        self.engine.abort(request)
                if closing:
                    self.engine.abort_all()
                    return
                self.engine.step()
                self._stepped()
        except BaseException as error:  # every reader must learn of it
            with self._work:  # a reader that is about to add itself is woken, too
                self.failure = error
        finally:
            for stream in list(self._streams.values()):
                stream.wake()


class _Outputs:
    """Collects the outputs of requests and their forks, by the request that was added."""

    def __init__(self) -> None:
        self.forks: dict[Request, dict[int, Request]] = {}
        self.done = 0

    def listener(self, request: Request, text: str) -> None:
        root = request.parent or request
        self.forks.setdefault(root, {})[request.index] = request
        if request.finished and self.complete(root):
            self.done += 1

    def complete(self, root: Request) -> bool:
        """Whether all outputs have ended."""
        ended = sum(one.finished for one in self.forks.get(root, {}).values())
        return ended == root.outputs

    def of(self, root: Request) -> RequestOutput:
        return output_of(list(self.forks.get(root, {0: root}).values()))  # a copy: another thread may add to it


class _Stream:
    """Wakes one reader, in its own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.news, self.outputs = loop, asyncio.Event(), _Outputs()

    def listener(self, request: Request, text: str) -> None:
        self.outputs.listener(request, text)
        self.wake()

    def wake(self) -> None:
        """A closed loop has no reader any more."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.news.set)


def engine_options(options: dict[str, Any]) -> EngineOptions:
    """`EngineOptions` from names, see `with_ring`. Raises `OptionError` for a name that it does not have."""
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise OptionError(f"unknown option {name!r}; an engine has {', '.join(known)}")
    return EngineOptions(**with_ring(options))


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    found: list[Any] = list(prompts)
    return [found] if found and all(isinstance(one, int) for one in found) else found
