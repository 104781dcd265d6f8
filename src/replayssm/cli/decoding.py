"""What the commands that decode share: a loaded model, its prompt, and what a run over it returns."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from transformers import logging as transformers_logging

from replayssm.cli.options import Decode
from replayssm.dtypes import ResolvedDtype, resolve_state_dtype
from replayssm.engine.options import EngineOptions
from replayssm.engine.request import Logprob
from replayssm.errors import DeviceError, ModelFilesError, PromptError
from replayssm.models.cache import config_state_dtype
from replayssm.models.loading import LoadedModel, load_model

# By the engine with drafts, with a ring, without; by transformers.
Route = Literal["spec", "replay", "packed", "stock"]

# Parameters below which one CPU thread is as fast as several, and far faster when another process wants a core.
SMALL_MODEL = 50_000_000


class Prompt(NamedTuple):
    """Token ids [1, T]."""

    ids: torch.Tensor

    @property
    def length(self) -> int:
        """T."""
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> list[int]:
        """The ids as a list."""
        found: list[int] = self.ids[0].tolist()
        return found


@dataclass(frozen=True)
class Run:
    """Tokens of one run, and what the engine says about them (stock transformers: the tokens alone).

    `stopped` is the stop text that ended it; `traffic` what the ops counted; `drafts` those of each decode step.
    """

    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    text: str = ""
    stopped: str | None = None
    logprobs: tuple[Logprob, ...] = ()
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    traffic: dict[str, int] | None = field(default=None)
    steps: int | None = None
    drafted: int = 0
    drafts_kept: int = 0
    drafts: tuple[tuple[int, ...], ...] = ()

    @property
    def decoded(self) -> int:
        """Tokens of decode steps; the first one comes out of the prompt's forward."""
        return len(self.tokens) - 1

    @property
    def decode_steps(self) -> int:
        """Forwards behind the prompt's: one for each token where there are no drafts."""
        return self.decoded if self.steps is None else self.steps

    @property
    def rate(self) -> float | None:
        """Decoded tokens a second."""
        return self.decoded / self.decode_seconds if self.decoded and self.decode_seconds > 0 else None


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


def encode(loaded: LoadedModel, text: str, max_tokens: int, context: int | None = None) -> Prompt:
    """Tokenize, and refuse a prompt that leaves no room for `max_tokens` in the model's context, or a smaller one."""
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    length, most, whose = ids.shape[1], loaded.context_length, "the model's context"
    if context is not None and context < most:
        most, whose = context, "--context"
    if not length:
        raise PromptError("the prompt has no tokens; give at least one word")
    if length + max_tokens > most:
        raise PromptError(
            f"prompt of {length} tokens + {max_tokens} new tokens = {length + max_tokens}, but {whose} "
            f"is {most}; shorten the prompt to {max(most - max_tokens, 0)} tokens or generate "
            f"{max(most - length, 0)}"
        )
    return Prompt(ids.to(loaded.model.device))


def state_dtype(loaded: LoadedModel, decode: Decode | EngineOptions) -> ResolvedDtype:
    """The dtype that `enable` and the engine will use, and who decided it."""
    return resolve_state_dtype(decode.state_dtype, config_state_dtype(loaded.config.get_text_config(decoder=True)))


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Tokens that end a text by the model's own account, as the engine takes them."""
    for found in (loaded.model.generation_config, loaded.config.get_text_config(decoder=True), loaded.tokenizer):
        eos = getattr(found, "eos_token_id", None)
        if eos is not None:
            every = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(token, int) for token in every):
                raise ModelFilesError(f"eos_token_id {eos!r} is not a token id or a list of them")
            return every
    return []


def peak_memory(loaded: LoadedModel) -> tuple[int, str]:
    """Bytes, and of what: the GPU's allocations, or the whole process."""
    if loaded.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(loaded.model.device), "GPU allocations"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
