"""One timed run of a loaded model over a prompt: by replay, by packed decode, or by stock transformers."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from transformers import GenerationConfig, TextStreamer, set_seed
from transformers import logging as transformers_logging
from transformers.generation.streamers import BaseStreamer

from replayssm import ops
from replayssm.cli.options import Decode, Sampling
from replayssm.dtypes import ResolvedDtype, resolve_state_dtype
from replayssm.errors import DeviceError, ModelFilesError, PromptError
from replayssm.models.cache import config_state_dtype
from replayssm.models.enable import disable, enable
from replayssm.models.loading import LoadedModel, load_model

Route = Literal["replay", "packed", "stock"]

# Parameters below which one CPU thread is as fast as several, and far faster when another process wants a core.
SMALL_MODEL = 50_000_000


class Prompt(NamedTuple):
    """Token ids [1, T]."""

    ids: torch.Tensor

    @property
    def length(self) -> int:
        """T."""
        return int(self.ids.shape[1])


@dataclass(frozen=True)
class Run:
    """Tokens of one run, its times, and the traffic that the ops counted (None for stock)."""

    tokens: list[int]
    prompt_seconds: float
    decode_seconds: float
    finish_reason: Literal["eos", "length"]
    traffic: dict[str, int] | None = field(default=None)

    @property
    def decode_steps(self) -> int:
        """Forwards of one token each; the first token comes out of the prompt's forward."""
        return len(self.tokens) - 1


def load(name: str, dtype: str, device: str | None) -> LoadedModel:
    """`load_model` without the bars and warnings of the libraries below it."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if device is not None:
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise DeviceError(f"device {device!r} has no backend; use cpu, cuda or cuda:N")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    loaded = load_model(name, dtype=dtype, device=device)
    small = loaded.model.num_parameters() < SMALL_MODEL
    if loaded.model.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return loaded


def encode(loaded: LoadedModel, text: str, max_tokens: int) -> Prompt:
    """Tokenize, and refuse a prompt that leaves no room for `max_tokens` in the model's context."""
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    length, context = ids.shape[1], loaded.context_length
    if not length:
        raise PromptError("the prompt has no tokens; give at least one word")
    if length + max_tokens > context:
        raise PromptError(
            f"prompt of {length} tokens + {max_tokens} new tokens = {length + max_tokens}, but the model's context "
            f"is {context}; shorten the prompt to {max(context - max_tokens, 0)} tokens or generate "
            f"{max(context - length, 0)}"
        )
    return Prompt(ids.to(loaded.model.device))


def state_dtype(loaded: LoadedModel, decode: Decode) -> ResolvedDtype:
    """The dtype that `enable` will use, and who decided it."""
    return resolve_state_dtype(decode.state_dtype, config_state_dtype(loaded.config.get_text_config(decoder=True)))


def run(
    loaded: LoadedModel,
    prompt: Prompt,
    route: Route,
    decode: Decode,
    sampling: Sampling,
    max_tokens: int,
    *,
    on_text: Callable[[str], None] | None = None,
    on_token: Callable[[], None] | None = None,
) -> Run:
    """Generate from `prompt`; the same arguments with another `route` must give the same tokens."""
    streamer = _Stopwatch(loaded.tokenizer, on_text, on_token)
    config = generation_config(loaded, sampling, max_tokens)
    set_seed(sampling.seed)
    with decoding(loaded, route, decode), _counted(route) as traffic:
        out = generate(loaded)(
            prompt.ids, attention_mask=torch.ones_like(prompt.ids), generation_config=config, streamer=streamer
        )
    tokens = out[0, prompt.length :].tolist()
    times = streamer.times
    ended = tokens[-1] in _eos_ids(config)
    return Run(tokens, times[1] - times[0], times[-1] - times[1], "eos" if ended else "length", dict(traffic) or None)


def last_logits(
    loaded: LoadedModel, prompt: Prompt, route: Route, decode: Decode, sampling: Sampling, steps: int
) -> torch.Tensor:
    """Logits [vocab], in fp32 on the CPU, from which a run chose its token number `steps` (counted from 0)."""
    kept: list[torch.Tensor] = []

    def keep(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept[:] = [scores[0].float().cpu()]
        return scores

    set_seed(sampling.seed)
    with decoding(loaded, route, decode):
        generate(loaded)(
            prompt.ids,
            attention_mask=torch.ones_like(prompt.ids),
            generation_config=generation_config(loaded, sampling, steps + 1),
            logits_processor=[keep],
        )
    return kept[0]


def generate(loaded: LoadedModel) -> Callable[..., torch.Tensor]:
    """`model.generate`, which nn.Module's types do not know."""
    return loaded.model.generate  # type: ignore[return-value]


def decoding(loaded: LoadedModel, route: Route, decode: Decode) -> Any:
    """Context in which the model decodes by `route`."""
    if route == "stock":
        disable(loaded.model)
        return nullcontext()
    return enable(loaded.model, decode.ring_len, decode.state_dtype, mode=route)


def generation_config(loaded: LoadedModel, sampling: Sampling, max_tokens: int) -> GenerationConfig:
    """All sampling values explicit, so that the checkpoint's own defaults do not slip in."""
    own = loaded.model.generation_config
    eos = own.eos_token_id if own.eos_token_id is not None else loaded.tokenizer.eos_token_id
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise ModelFilesError(f"eos_token_id {eos!r} in generation_config.json is not a token id or a list of them")
    pad = own.pad_token_id if own.pad_token_id is not None else (eos[0] if isinstance(eos, list) else eos)
    values: dict[str, Any] = {"max_new_tokens": max_tokens, "eos_token_id": eos, "pad_token_id": pad}
    if sampling.greedy:
        return GenerationConfig(do_sample=False, **values)
    return GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, **values
    )


def peak_memory(loaded: LoadedModel) -> tuple[int, str]:
    """Bytes, and of what: the GPU's allocations, or the whole process."""
    if loaded.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(loaded.model.device), "GPU allocations"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def _eos_ids(config: GenerationConfig) -> set[int]:
    eos = config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, list) else {eos}


@contextmanager
def _counted(route: Route) -> Iterator[dict[str, int]]:
    result: dict[str, int] = {}
    if route == "stock":
        yield result
        return
    with ops.count_traffic() as counted:
        yield result
    result.update(counted.totals()._asdict())


class _Stopwatch(BaseStreamer):
    """Times of the prompt's start and of every token; hands on text in whole characters when somebody listens."""

    def __init__(
        self, tokenizer: Any, on_text: Callable[[str], None] | None, on_token: Callable[[], None] | None
    ) -> None:
        self.times: list[float] = []
        self._on_token = on_token
        self._text = None if on_text is None else _Text(tokenizer, on_text)

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if self._text is not None:
            self._text.put(value)
        if self._on_token is not None and len(self.times) > 1:
            self._on_token()

    def end(self) -> None:
        if self._text is not None:
            self._text.end()


class _Text(TextStreamer):
    """Holds a token back until its characters are complete, then hands the text on."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)
