"""`replayssm generate --jsonl`: many prompts through the engine, results as lines of JSON in the same order."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import IO, Any

from replayssm.cli.console import counter, print_json, step
from replayssm.cli.decoding import end_tokens, load
from replayssm.cli.generate_request import GenerateRequest, Line
from replayssm.cli.memory import print_memory
from replayssm.cli.prompt_lines import asked_of, kept_keys, read_object, result_of
from replayssm.cli.speculation import ring_note
from replayssm.engine.core import Engine
from replayssm.engine.request import Request, output_of
from replayssm.errors import ReplayError
from replayssm.models.loading import find_model
from replayssm.models.mtp import check_mtp


def run_many(request: GenerateRequest) -> int:
    """Return 0, or 1 when a line failed."""
    args, lines, options = request.args, request.lines or [], request.engine
    if options.spec == "mtp":
        check_mtp(find_model(args.model), args.model)
    with ExitStack() as stack:
        with step(f"loading {args.model}", args.quiet):
            loaded = load(args.model, args.dtype, args.device)
            end_tokens(loaded)
            engine = stack.enter_context(closing(Engine(loaded, options)))
        if not args.quiet:
            if (note := ring_note(options, args.ring_len)) is not None:
                print(note, file=sys.stderr)
            print_memory(engine)
        out = args.out
        if request.out is not None:
            # what UTF-8 does not have is written as JSON writes it
            out = stack.enter_context(request.out.open("w", encoding="utf-8", errors="backslashreplace"))
        start = time.perf_counter()
        # results that scroll by are progress enough, and a bar would come between them
        hidden = args.quiet or out.isatty()
        with counter(f"generating from {len(lines)} prompts", len(lines), hidden) as tick:
            results, done = Results(out, tick), deque[_Outputs]()
            for order, line in enumerate(lines):
                _submit(engine, line, order, request.given, results, done)
            while not engine.idle:
                engine.step()
                while done:
                    done.popleft().give(results)
        seconds, stats = time.perf_counter() - start, engine.stats
    if not args.quiet:
        failed = f", {results.failed} of them failed" if results.failed else ""
        rate = f": {results.tokens / seconds:.1f} tokens/s" if results.tokens else ""
        print(f"{len(lines)} prompts{failed}, {results.tokens} tokens in {seconds:.2f} s{rate}", file=sys.stderr)
        if options.spec is not None:
            right = f" ({100 * stats.drafts_kept / stats.drafted:.1f} %)" if stats.drafted else ""
            print(f"{stats.drafted} drafted, {stats.drafts_kept} kept{right}", file=sys.stderr)
    return 1 if results.failed else 0


class Results:
    """Results in the order of their prompts; one that is ready waits for those before it.

    Attributes:
        failed: lines with an error.
        tokens: that were made.
    """

    def __init__(self, out: IO[str], tick: Callable[[], None]) -> None:
        self._out, self._tick = out, tick
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0
        self.failed = 0
        self.tokens = 0

    def add(self, order: int, result: dict[str, Any], tokens: int = 0) -> None:
        """The result of prompt number `order`, from 0. Everything whose turn it is now is written."""
        self._ready[order] = result
        self.failed += "error" in result
        self.tokens += tokens
        self._tick()
        while self._next in self._ready:
            print_json(self._ready.pop(self._next), self._out)
            self._next += 1
        self._out.flush()


class _Outputs:
    """The outputs of one prompt, which end one by one. The last one puts it on `done`."""

    def __init__(self, order: int, line: Line, kept: dict[str, Any], done: deque[_Outputs]) -> None:
        self._order, self._line, self._kept, self._done = order, line, kept, done
        self._ended: list[Request] = []

    def listener(self, request: Request, text: str) -> None:
        """The engine's listener for the prompt and its forks."""
        root = request.parent or request
        if request.finished:
            self._ended.append(request)
            if len(self._ended) == root.outputs:
                self._done.append(self)

    def give(self, results: Results) -> None:
        """Hand them on as one result."""
        output = output_of(self._ended)
        result = result_of(output, self._line.number, self._kept)
        results.add(self._order, result, sum(len(one.token_ids) for one in output.outputs))


def _submit(
    engine: Engine, line: Line, order: int, defaults: dict[str, Any], results: Results, done: deque[_Outputs]
) -> None:
    """Queue one line, or give what is wrong with it as its result."""
    kept: dict[str, Any] = {}
    try:
        found = read_object(line)
        kept = kept_keys(found)
        asked = asked_of(found, defaults, order)
        engine.add(asked.prompt, asked.params, _Outputs(order, line, asked.kept, done).listener)
    except ReplayError as error:
        results.add(order, {**kept, "line": line.number, "error": str(error)})
