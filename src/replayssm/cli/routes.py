"""One prompt by one route. The same arguments with another route must give the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import Tensor

from replayssm import ops
from replayssm.cli.decoding import Prompt, Route, Run
from replayssm.cli.stock import stock_run
from replayssm.engine.core import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.models.loading import LoadedModel


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
    # One text is over before a compilation would pay. Without overlap no step runs that is thrown away and counted.
    context = min(prompt.length + params.max_tokens, options.context or loaded.context_length)
    options = replace(
        options, mode=route, max_requests=1, context=context, graphs=False, fuse=False, paged=False, overlap=False
    )
    pieces: list[str] = []
    with closing(Engine(loaded, options)) as engine, ops.count_traffic() as counted:
        if on_start is not None:
            on_start(engine)
        request = engine.add(prompt.tokens, params, lambda request, text: pieces.append(text))
        while not engine.idle:
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
    )


def last_logits(
    loaded: LoadedModel, prompt: Prompt, route: Route, options: EngineOptions, params: SamplingParams, steps: int
) -> Tensor:
    """Logits [vocabulary], as the model gives them, from which a run chooses its token number `steps`, from 0."""
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept[:] = [output.logits[0, -1].detach().clone()]

    hook = loaded.model.register_forward_hook(keep)
    try:
        run(loaded, prompt, route, options, replace(params, max_tokens=steps + 1))
    finally:
        hook.remove()
    return kept[0]
