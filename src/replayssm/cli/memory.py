"""How an engine splits its memory, as a few lines for people."""

from __future__ import annotations

import sys

from replayssm.cli.console import human_bytes, print_table
from replayssm.engine.core import Engine


def print_memory(engine: Engine) -> None:
    """Bytes by purpose, and what fits into them, on stderr."""
    plan = engine.plan
    rows = [(name, human_bytes(size)) for name, size in plan.split() if size]
    print_table((f"memory {human_bytes(plan.budget)}", ""), rows, sys.stderr)
    whole = plan.tokens / (-(-engine.context // plan.page_size) * plan.page_size)
    print(
        f"slots {plan.slots}, tokens {plan.tokens}, maximum concurrency at {engine.context} tokens each: "
        f"{min(plan.slots, whole):.4g}",
        file=sys.stderr,
        flush=True,
    )
