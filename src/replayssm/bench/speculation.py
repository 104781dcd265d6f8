"""Tokens a second with drafts that are right at a set rate, strategy by strategy; a check before every number.

Drafts are random tokens, and how many of them count as right is drawn: each with the chance that was asked for, up to
the first that does not. So every strategy has the same windows to verify and the same parts of them to keep, whatever
weights the model has. What a drafter costs is not in it.

Before a row is timed, its engine decodes the batch greedily with drafts from what packed decode said, a part of them
wrong, and is held against that (`serving_check`). A row that fails has no time.

    strategy                          "none" (plain decode, mode auto), "ring", "snapshot", "kv-replay", "fold"
    batch, state_dtype, status, error, check, memory_bytes, reserved_bytes, notes   as in `replayssm.bench.serving`
    tokens_per_s, step_ms             of the window: decode steps in which all requests run
    tokens_per_step                   of a request
    steps                             in the window
    slots                             requests that the memory plan has room for, where the batch does not limit it
    vs_none                           tokens a second over those of plain decode
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from typing import Any

from replayssm.bench import serving_check, workload
from replayssm.bench.serving import Progress, Result, _free, _graph_notes, _guarded
from replayssm.bench.spec_request import NONE, WARM_STEPS, SpecRequest
from replayssm.engine.core import Engine
from replayssm.engine.request import Request
from replayssm.engine.runner import Flight
from replayssm.models.loading import LoadedModel
from replayssm.state import on


class FromTranscripts:
    """Drafts what packed decode said next, with a wrong token at a place of its own in each window."""

    def __init__(self, said: Sequence[serving_check.Transcript], vocabulary: int, seed: int) -> None:
        self.tokens = {tuple(one.prompt): one.tokens for one in said}
        self.vocabulary, self.draw = vocabulary, random.Random(seed)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See `replayssm.engine.drafters.Drafter`."""
        found = []
        for request, count in zip(requests, most, strict=True):
            known = self.tokens.get(tuple(request.prompt), [])[len(request.output) :][:count]
            drafts = [*known, *(self.draw.randrange(self.vocabulary) for _ in range(count - len(known)))]
            if drafts and (wrong := self.draw.randrange(count + 1)) < len(drafts):
                drafts[wrong] = self.draw.randrange(self.vocabulary)
            found.append(drafts)
        return found

    def follow(self, request: Request, kept: int) -> None:
        """The text says it all."""

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""


class Drawn:
    """Makes an engine draft random tokens and take them at a set rate."""

    def __init__(self, engine: Engine, acceptance: float, seed: int) -> None:
        self.acceptance, self.draw = acceptance, random.Random(seed)
        engine.drafter = FromTranscripts((), engine.vocabulary, seed)
        launch = engine.runner.launch

        def launched(step: Any, drafts: Any = None) -> Flight | None:
            flight = launch(step, drafts)
            if flight is not None:
                read = flight.results
                flight.results = lambda: self._judged(flight, read())  # type: ignore[method-assign]
            return flight

        engine.runner.launch = launched  # type: ignore[method-assign]

    def _judged(self, flight: Flight, results: list[Any]) -> list[Any]:
        tokens = flight.tokens()
        found, at = [], 0
        for row, result in zip(flight.rows, results, strict=True):
            made = 1
            while made <= len(row.drafts or ()) and self.draw.random() < self.acceptance:
                made += 1
            kept = result._replace(tokens=tokens[at : at + made], logprobs=[None] * made)
            found.append(kept if row.drafts is not None else result)
            at += row.width
        return found


def run(request: SpecRequest, loaded: LoadedModel, context: int, progress: Progress) -> Result:
    """All rows, by state dtype, batch and strategy."""
    found = Result()
    with on(loaded.model.device):
        for state_dtype in request.state_dtypes:
            references: dict[int, serving_check.Reference] = {}
            for strategy in ("packed", *request.strategies):
                with progress(f"engine, {strategy}, state {state_dtype}"):
                    engine = Engine(loaded, request.spec_options(strategy, state_dtype, context))
                try:
                    for batch in request.batches:
                        with progress(f"B = {batch}, {strategy}, state {state_dtype}"):
                            row = _row(request, engine, strategy, state_dtype, batch, references)
                        if strategy != "packed":
                            found.rows.append(row)
                finally:
                    engine.close()
                    del engine
                    gc.collect()
                    _free(loaded)
    base = {(r["batch"], r["state_dtype"]): r["tokens_per_s"] for r in found.rows if r["strategy"] == NONE}
    for row in found.rows:
        plain = base.get((row["batch"], row["state_dtype"]))
        row["vs_none"] = row["tokens_per_s"] / plain if plain and row["tokens_per_s"] else None
    order = [*request.strategies]
    found.rows.sort(
        key=lambda r: (request.state_dtypes.index(r["state_dtype"]), r["batch"], order.index(r["strategy"]))
    )
    return found


def _row(
    request: SpecRequest,
    engine: Engine,
    strategy: str,
    state_dtype: str,
    batch: int,
    references: dict[int, serving_check.Reference],
) -> dict[str, Any]:
    row: dict[str, Any] = dict(batch=batch, strategy=strategy, state_dtype=state_dtype, status="failed", error=None)
    row |= dict.fromkeys(("check", "tokens_per_s", "step_ms", "tokens_per_step", "steps", "vs_none"))
    row |= dict(memory_bytes=None, reserved_bytes=None, slots=engine.plan.slots, mode=strategy, notes=[])
    args = request.args

    def work() -> bool:
        texts = workload.prompts(batch, args.prompt_tokens, engine.vocabulary, args.seed)
        if not _check(engine, texts, args, strategy, batch, references, row) or strategy == "packed":
            return True
        plain = engine.runner.launch
        try:
            if engine.options.spec is not None:
                Drawn(engine, args.acceptance, args.seed)
            for timed in (False, True):  # the first run compiles and records what the second needs
                _time(engine, texts, args, batch, row if timed else {})
        finally:
            engine.runner.launch = plain  # type: ignore[method-assign]
            engine.abort_all()
        row["notes"] = _graph_notes(engine)
        row["status"] = "ok"
        return True

    _guarded(engine, row, work)
    return row


def _check(
    engine: Engine,
    texts: list[list[int]],
    args: Any,
    strategy: str,
    batch: int,
    references: dict[int, serving_check.Reference],
    row: dict[str, Any],
) -> bool:
    """Decode greedily with drafts and judge it; packed decode leaves its reference."""
    if strategy != "packed" and batch not in references:
        raise workload.RunError("packed decode, which this is checked against, did not pass its own check")
    if engine.options.spec is not None:
        engine.drafter = FromTranscripts(references[batch].transcripts, engine.vocabulary, args.seed)
    made = workload.run(engine, texts, serving_check.sampling(batch, min(64, args.output_tokens)))
    said = serving_check.transcripts(made)
    if strategy == "packed":
        found = serving_check.reference(engine, said)
        verdict = serving_check.judge_packed(found)
        if verdict.ok:
            references[batch] = found
    else:
        verdict = serving_check.judge(said, references[batch])
    row["check"] = verdict.as_json()
    row["error"] = None if verdict.ok else str(verdict)
    return verdict.ok


def _time(engine: Engine, texts: list[list[int]], args: Any, batch: int, row: dict[str, Any]) -> None:
    """`args.steps` decode steps with all requests at once."""
    workload.reset_peak_memory(engine.slots.device)
    made = workload.submit(engine, texts, workload.params(args.output_tokens))
    workload.ramp(engine, made)
    for _ in range(WARM_STEPS):
        engine.step()
    engine.drain()
    workload.synchronize(engine)
    before, begin = sum(len(one.tokens) for one in made), time.perf_counter()
    for _ in range(args.steps):
        engine.step()
    engine.drain()
    workload.synchronize(engine)
    seconds, tokens = time.perf_counter() - begin, sum(len(one.tokens) for one in made) - before
    if any(one.finished for one in made):
        raise workload.RunError("a request ended within the window that was timed")
    engine.abort_all()
    row |= workload.peak_memory(engine.slots.device)
    row |= dict(tokens_per_s=tokens / seconds, step_ms=1e3 * seconds / args.steps, steps=args.steps)
    row |= dict(tokens_per_step=tokens / args.steps / batch)
