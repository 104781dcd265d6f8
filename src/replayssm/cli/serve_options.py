"""Options of `replayssm serve`: one table for the command line and for the file of `--config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayssm.cli.speculation import DRAFTERS, HELP, SPEC_STATES


@dataclass(frozen=True)
class Option:
    """One option; without a default here, that of the part it is for holds. `kind` bool makes --name and --no-name."""

    name: str
    help: str
    kind: Callable[[str], Any] | type = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """In a namespace."""
        return self.name.replace("-", "_")


GROUPS: dict[str, tuple[Option, ...]] = {
    "model": (
        Option("served-name", "what clients call it (default: MODEL as given)", metavar="NAME"),
        Option(
            "dtype",
            "of weights and activations (default float32; auto: as stored)",
            choices=("float32", "bfloat16", "float16", "auto"),
        ),
        Option("device", "cpu, cuda, cuda:1 … (default: cuda where there is one)", metavar="DEV"),
        Option("chat-template", "a Jinja template instead of the model's", metavar="FILE"),
    ),
    "server": (
        Option("host", "address to listen on (default 127.0.0.1: this machine alone; 0.0.0.0: all)", metavar="H"),
        Option("port", "default 8000; 0 takes a free one", int, "N"),
        Option("api-key", "that requests must bear (default: $REPLAYSSM_API_KEY, else none)", metavar="KEY"),
        Option("max-queue", "outputs that may wait; more get 429 (default 256)", int, "N"),
        Option("max-body", "largest request (default 4MiB)", metavar="SIZE"),
        Option("drain-seconds", "that running requests get after SIGTERM (default 60)", int, "S"),
    ),
    "decode": (
        Option("mode", "auto: the faster one at each batch size (default)", choices=("auto", "replay", "packed")),
        Option("ring-len", "decode steps between two writes of the state, 1…64 (default 8; 16 with --spec)", int, "L"),
        Option("state-dtype", "float32, bfloat16, float16 (default: as for `generate`)", metavar="D"),
    ),
    "memory": (
        Option("memory", "for everything, as in 60GB (default: 0.9 of the GPU's)", metavar="SIZE"),
        Option("memory-fraction", "of the GPU's memory instead (default 0.9)", float, "F"),
        Option("max-requests", "that decode at once (default: what fits, 256; on a CPU 32)", int, "N"),
        Option("context", "longest prompt with answer (default: the model's)", int, "N"),
        Option("page-size", "tokens of a page (default 64 on a GPU, 16 on a CPU)", int, "N"),
        Option("preempt", "what gives way when pages run out (default offload)", choices=("offload", "recompute")),
    ),
    "prefix cache": (
        Option("prefix-cache", "compute what prompts begin with alike only once (default off)", bool),
        Option(
            "prefix-policy",
            "what a request leaves: the state of its full length (default), or of its last fold",
            choices=("materialize", "truncate"),
        ),
        Option(
            "prefix-strategy",
            "extra_buffer: two kept states of each running request in advance (default no_buffer)",
            choices=("no_buffer", "extra_buffer"),
        ),
        Option("prefix-interval", "tokens between kept states of a request (default 64)", int, "N"),
        Option("prefix-share", "of the memory besides weights, for kept states (default 0.1)", float, "F"),
    ),
    "speculation": (
        Option("spec", HELP["spec"], choices=DRAFTERS),
        Option("spec-tokens", HELP["spec_tokens"], int, "N"),
        Option("spec-state", HELP["spec_state"], choices=SPEC_STATES),
        Option("spec-adaptive", HELP["spec_adaptive"], bool),
    ),
    "engine": (
        Option("chunk-tokens", "of prompts in a step (default 2048)", int, "N"),
        Option("graphs", "CUDA graphs for decode steps (default on)", bool),
        Option("overlap", "read a step's tokens while the next one runs (default: on a GPU)", bool),
    ),
    "names of other engines": (
        Option("enable-linear-replayssm", "--mode replay", bool),
        Option("linear-replayssm-cache-len", "--ring-len", int, "L"),
        Option("mamba-ssm-dtype", "--state-dtype", metavar="D"),
        Option("mamba-scheduler-strategy", "--prefix-strategy", metavar="S"),
        Option("mem-fraction-static", "--memory-fraction", float, "F"),
        Option("linear-attn-decode-backend", "triton on a GPU changes nothing; others are refused", metavar="B"),
    ),
}
OPTIONS = {option.key: option for options in GROUPS.values() for option in options}
