"""The options of `replayssm bench prefix`. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from replayssm.bench.prefix_request import PARTS, PrefixRequest
from replayssm.engine.options import EngineOptions, PrefixPolicy, PrefixStrategy

EXAMPLES = """\
Parts:
  turns   conversations of several turns; each prompt is all that was said, and --prompt-tokens new tokens
  shared  requests that begin with one system prompt and end with --prompt-tokens tokens of their own
  again   a prompt that is sent again while its first request still runs, and once more with its answer behind it
  tree    the tree of prefixes alone, without a model: time to look a prefix up and to enter one

Requests run one after the other, with the cache (warm) and without (cold). Before a number, their tokens are held
against packed decode without a cache; in fp32 they must be equal, in 16 bits near-ties may differ.

examples:
  replayssm bench prefix gdn --parts turns,shared --conversations 2
  replayssm bench prefix --config Qwen3.5-4B --history 8192 --system 4096 --json out.json --plot out.png

exit code: 0 done, 1 a row failed its check, 2 wrong input"""


def add_bench_prefix(suites: Any, shared: Callable[[argparse.ArgumentParser], None]) -> None:
    """The sub-command; `shared` adds what the other engine suites have as well."""
    parser = suites.add_parser(
        "prefix",
        help="the prefix cache: TTFT with and without it, what it reuses, the cost of its tree",
        description="Time to the first token with the prefix cache and without, with replay and without.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(request=PrefixRequest.from_args, command="bench_prefix")
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="P,…", help="what is measured (default %(default)s)"
    )
    work = parser.add_argument_group("requests")
    for name, default, said in (
        ("conversations", 4, "of turns"),
        ("turns", 4, "of a conversation"),
        ("history", 2048, "tokens of a conversation's first prompt"),
        ("requests", 16, "of shared"),
        ("system", 1024, "tokens that requests of shared begin with"),
        ("repeat", 1000, "tokens of the prompt of again"),
        ("prefixes", 100_000, "in the tree"),
        ("depth", 4096, "tokens of a prefix in the tree"),
    ):
        work.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{said} (default %(default)s)")
    cache = parser.add_argument_group("prefix cache")
    cache.add_argument(
        "--interval",
        type=int,
        default=EngineOptions.prefix_interval,
        metavar="N",
        help="tokens between states that are kept (default %(default)s)",
    )
    cache.add_argument(
        "--prefix-policy",
        choices=get_args(PrefixPolicy),
        default=EngineOptions.prefix_policy,
        help="what a request leaves: its whole state, or that of its last fold (default %(default)s)",
    )
    cache.add_argument(
        "--prefix-strategy",
        choices=get_args(PrefixStrategy),
        default=EngineOptions.prefix_strategy,
        help="whether running requests hold states in advance (default %(default)s)",
    )
    shared(parser)
    parser.set_defaults(mode="replay,packed", prompt_tokens=64, output_tokens=32)
