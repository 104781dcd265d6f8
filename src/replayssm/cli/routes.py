"""One prompt by one route. The same arguments with another route must give the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from replayssm import ops
from replayssm.cli.decoding import Prompt, Route, Run
from replayssm.cli.stock import stock_run
from replayssm.engine.core import Engine
from replayssm.engine.drafters import Drafter
from replayssm.engine.options import EngineOptions, Mode
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request
from replayssm.models.loading import LoadedModel


def without_drafts(options: EngineOptions) -> Route:
    """How the engine decodes a token when it has no drafts for it."""
    return "replay" if options.spec_state == "ring" and options.mode != "packed" else "packed"


def run(
    loaded: LoadedModel,
    prompt: Prompt,
    route: Route,
    options: EngineOptions,
    params: SamplingParams,
    *,
    on_start: Callable[[Engine], None] | None = None,
    on_text: Callable[[str], None] | None = None,
    on_token: Callable[[], None] | None = None,
) -> Run:
    """Generate from `prompt`. The engine calls `on_start` before the first step, `on_text` between steps."""
    if route == "stock":
        return stock_run(loaded, prompt, params, on_token)
    pieces: list[str] = []
    with _engine(loaded, prompt, route, options, params) as engine, ops.count_traffic() as counted:
        if on_start is not None:
            on_start(engine)
        noted = _Noted(engine.drafter)
        if route == "spec":
            engine.drafter = noted
        request = engine.add(prompt.tokens, params, lambda request, text: pieces.append(text))
        steps = 0
        while not engine.idle:
            steps += request.first_token is not None
            engine.step()
            for text in pieces:
                if on_text is not None:
                    on_text(text)
                if on_token is not None:
                    on_token()
            pieces.clear()
        traffic = counted.totals()._asdict()
    if request.reason not in ("stop", "length") or request.first_token is None or request.last_token is None:
        raise RuntimeError(f"the engine ended the request: {request.error or request.reason}")
    return Run(
        request.output,
        request.reason,
        request.stream.text,
        request.stream.stopped,
        tuple(request.logprobs),
        request.first_token - request.arrived,
        request.last_token - request.first_token,
        traffic,
        steps,
        request.drafted,
        request.drafts_kept,
        tuple(noted.drafts),
    )


def last_logits(
    loaded: LoadedModel,
    prompt: Prompt,
    route: Route,
    options: EngineOptions,
    params: SamplingParams,
    steps: int,
    drafts: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Logits [vocabulary], as the model gives them, from which a run chooses its token number `steps`, from 0.

    `drafts` are those of each decode step of a run with drafts, so that its windows are the same again.
    """
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept[:] = [output.logits[:, -1].detach().clone()]

    hook = loaded.model.register_forward_hook(keep)
    try:
        if route != "spec":
            run(loaded, prompt, route, options, replace(params, max_tokens=steps + 1))
            return kept[0][0]
        # pages for as many drafts as there may be
        with _engine(loaded, prompt, route, replace(options, spec_adaptive=False), params) as engine:
            engine.drafter = _Noted(None, drafts)
            request, before = engine.add(prompt.tokens, params), 0
            while not engine.idle and len(request.output) <= steps:
                before = len(request.output)
                engine.step()
            engine.abort(request)
            return kept[0][steps - before]
    finally:
        hook.remove()


@contextmanager
def _engine(
    loaded: LoadedModel, prompt: Prompt, route: Route, options: EngineOptions, params: SamplingParams
) -> Iterator[Engine]:
    mode: Mode = "packed" if route == "packed" else "replay"
    if route == "spec":
        mode = options.mode
    # One text is over before a compilation would pay. Without overlap no step runs that is thrown away and counted.
    context = min(prompt.length + params.max_tokens, options.context or loaded.context_length)
    options = replace(
        options, mode=mode, spec=options.spec if route == "spec" else None, max_requests=1, context=context,
        graphs=False, fuse=False, paged=False, overlap=False,
    )  # fmt: skip
    with closing(Engine(loaded, options)) as engine:
        yield engine


class _Noted:
    """A drafter that notes what another one drafts, or drafts what was noted."""

    def __init__(self, drafter: Drafter | None, again: Sequence[Sequence[int]] = ()) -> None:
        self.drafter, self._again = drafter, iter(again)
        self.drafts: list[tuple[int, ...]] = []

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        if self.drafter is None:
            return [list(next(self._again, ()))]
        found = self.drafter.propose(requests, most)
        self.drafts += map(tuple, found)
        return found

    def follow(self, request: Request, kept: int) -> None:
        if self.drafter is not None:
            self.drafter.follow(request, kept)

    def forget(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.forget(request)
