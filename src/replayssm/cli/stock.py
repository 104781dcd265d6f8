"""`generate()` of stock transformers, drawing its tokens as the engine draws them.

Transformers decides the logits, the cache and the end. Where more is asked than the likeliest token, a logits processor
draws with the engine's sampler: its noise is a function of seed, position and token, so that equal logits give equal
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from replayssm.cli.decoding import Prompt, Run, end_tokens
from replayssm.engine.params import SamplingParams
from replayssm.engine.sampler import NEVER, History, prepare, sample
from replayssm.engine.text import TextStream
from replayssm.models.enable import disable
from replayssm.models.loading import LoadedModel


def stock_run(
    loaded: LoadedModel, prompt: Prompt, params: SamplingParams, on_token: Callable[[], None] | None = None
) -> Run:
    """Tokens by `model.generate()` with the stock layers."""
    disable(loaded.model)
    ends = [] if params.ignore_eos else end_tokens(loaded)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=params.max_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    stop = _StopText(loaded.tokenizer, params.stop, prompt.length)
    with bare_generation_config(loaded):
        out = generate(loaded)(
            prompt.ids,
            attention_mask=torch.ones_like(prompt.ids),
            generation_config=config,
            logits_processor=[_Draw(prompt, params)],
            stopping_criteria=[stop],
            streamer=_Ticks(on_token),
        )
    tokens = out[0, prompt.length :].tolist()
    return Run(tokens, "stop" if tokens[-1] in ends or stop.stopped else "length")


def draw(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> int:
    """The token that the engine's sampler takes after `output`, by logits [vocabulary]."""
    batch = prepare([params], [params.seed or 0], logits.device)
    history = None
    if batch.penalised:
        seen = torch.zeros(1, len(logits), dtype=torch.bool)
        seen[0, list(prompt)] = True
        counts = torch.bincount(torch.tensor(list(output), dtype=torch.int64), minlength=len(logits))[None]
        history = History(seen.to(logits.device), counts.to(logits.device, torch.int32))
    position = torch.tensor([len(output)], device=logits.device)
    return int(sample(logits[None], batch, position, history).tokens[0])


def generate(loaded: LoadedModel) -> Callable[..., Tensor]:
    """`model.generate`, which nn.Module's types do not know."""
    return loaded.model.generate  # type: ignore[return-value]


@contextmanager
def bare_generation_config(loaded: LoadedModel) -> Iterator[None]:
    """The checkpoint's own defaults of sampling and length do not slip in."""
    model: Any = loaded.model
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class _Draw:
    """Leaves one token of the vocabulary: the one that `draw` takes. Greedy rows need no help."""

    def __init__(self, prompt: Prompt, params: SamplingParams) -> None:
        self._prompt, self._params = prompt.tokens, params
        batch = prepare([params], [0])
        self._idle = params.greedy and batch.bias is None and not batch.penalised

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self._idle:
            return scores
        token = draw(scores[0], self._prompt, ids[0, len(self._prompt) :].tolist(), self._params)
        left = torch.full_like(scores, NEVER)
        left[0, token] = 0.0
        return left


class _StopText:
    """Ends the output at a stop text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], start: int) -> None:
        self._stream = TextStream(tokenizer, stop) if stop else None
        self._read = start

    @property
    def stopped(self) -> bool:
        """Whether there was one."""
        return self._stream is not None and self._stream.stopped is not None

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._stream is not None:
            for token in ids[0, self._read :].tolist():
                self._stream.push(token)
            self._read = ids.shape[1]
        return torch.tensor([self.stopped], device=ids.device)


class _Ticks(BaseStreamer):
    """Counts tokens; the prompt comes first."""

    def __init__(self, on_token: Callable[[], None] | None) -> None:
        self._on_token = on_token
        self._started = False

    def put(self, value: Tensor) -> None:
        if self._started and self._on_token is not None:
            self._on_token()
        self._started = True

    def end(self) -> None:
        pass
