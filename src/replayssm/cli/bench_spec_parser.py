"""The options of `replayssm bench spec`. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from replayssm.bench.spec_request import SpecRequest

EXAMPLES = """examples:
  replayssm bench spec gdn --batch 1,4 --steps 8
  replayssm bench spec --config Qwen3.5-4B --batch 1,8,64 --acceptance 0.8 --json out.json --plot out.png"""


def add_bench_spec(suites: Any, shared: Callable[[argparse.ArgumentParser], None]) -> None:
    """The sub-command; `shared` adds what the other engine suites have as well."""
    parser = suites.add_parser(
        "spec",
        help="the engine with drafts at a set rate of right ones: ring, snapshot, kv-replay, fold",
        description="Tokens a second with windows of drafts, of which a set part is right, for each way to verify.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(request=SpecRequest.from_args, command="bench_spec")
    parser.add_argument("--batch", default="1,8,32,64", metavar="B,…", help="requests at once (default %(default)s)")
    parser.add_argument(
        "--spec-state", default="ring,snapshot,kv-replay,fold", metavar="S,…", help="strategies (default %(default)s)"
    )
    parser.add_argument("--spec-tokens", type=int, default=4, metavar="N", help="drafts (default %(default)s)")
    parser.add_argument(
        "--acceptance", type=float, default=0.8, metavar="P", help="chance that a draft is right (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=48, metavar="N", help="that are timed (default %(default)s)")
    shared(parser)
    parser.set_defaults(ring_len=16)
