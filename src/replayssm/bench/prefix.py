"""The prefix cache: time to the first token with it (warm) and without (cold), and what it takes over.

Each mode has two engines, one after the other: without a cache and with one. Both get the same requests in the same
order, each when the one before has ended; prompts are random tokens and what packed decode without a cache answered.
A first run of all of a part compiles, records and warms up; then the cache is emptied, and the second run is timed. The
answers of that run are held against packed decode without a cache (`serving_check`), and must be equal where weights
and states are fp32. A row in which they are not has no numbers.

Parts: `turns` has a case for each turn of its conversations. In `shared` the first request fills the cache, the others
find it. In `again` a prompt comes for the first time, then while that request is still running, of which only the
prompt was computed, then with the answer behind it. What a row says is in `replayssm.bench.prefix_rows`.

`caches` has, for each part, mode and state dtype, what the cache did in the timed run: tokens of prompts that were
`asked` for, and those hit: `kv` had pages, `state` had pages and a state, `usable` were taken over; `snapshots`, what
was `evicted`, what it has `kept` in the end and the `bytes` of that. `reuse` compares the tokens that were taken over
with replay (`on`) and with packed decode (`off`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from replayssm.bench import serving_check, workload
from replayssm.bench.prefix_request import PrefixRequest
from replayssm.bench.prefix_rows import Said, Script, Trial, cases, reuse, rows
from replayssm.bench.serving import Progress, _free, _graph_notes, _guarded, _plan
from replayssm.bench.serving_check import Transcript
from replayssm.engine.core import Engine
from replayssm.engine.options import Mode
from replayssm.engine.params import MAX_LOGPROBS
from replayssm.engine.request import Request
from replayssm.models.loading import LoadedModel
from replayssm.state import on
from replayssm.state.prefix import PrefixStats

Asking = Generator[list[int], list[int], None]  # yields prompts, is sent their answers


@dataclass
class PrefixResult:
    """Rows of all parts that run a model, see above, and the memory plan of each engine with a cache."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    reuse: list[dict[str, Any]] = field(default_factory=list)
    caches: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)


def run(request: PrefixRequest, loaded: LoadedModel, context: int, progress: Progress) -> PrefixResult:
    """All parts that run a model."""
    found, trials = PrefixResult(), list[Trial]()
    others: list[Mode] = [mode for mode in request.modes if mode != "packed"]
    modes: list[Mode] = ["packed", *others]
    with on(loaded.model.device):
        with progress("memory of a cache"):  # what an engine refuses, before minutes of work
            Engine(loaded, request.prefix_options(modes[-1], request.state_dtypes[0], context, cache=True)).close()
            _free(loaded)
        for state_dtype in request.state_dtypes:
            scripts: dict[str, Script] = {}
            for mode in modes:
                mine = [Trial(part, mode, state_dtype) for part in request.model_parts]
                for cache in (False, True) if mode in request.modes else (False,):
                    _one_engine(request, loaded, context, mine, scripts, cache, progress, found)
                if mode in request.modes:
                    trials += mine
                    found.rows += [row for trial in mine for row in rows(request, trial, scripts)]
    found.caches = [
        dict(part=one.part, mode=one.mode, state_dtype=one.state_dtype, **one.cache) for one in trials if one.cache
    ]
    for one in (found.rows, found.caches):
        one.sort(key=partial(_place, request))
    found.reuse = reuse(found.rows)
    return found


def _place(request: PrefixRequest, row: dict[str, Any]) -> tuple[int, ...]:
    names = [name for name, _ in cases(request, row["part"])]
    case = names.index(row["case"]) if "case" in row else 0
    state, part = request.state_dtypes.index(row["state_dtype"]), request.parts.index(row["part"])
    return state, part, case, request.modes.index(row["mode"])


def _one_engine(
    request: PrefixRequest,
    loaded: LoadedModel,
    context: int,
    trials: Sequence[Trial],
    scripts: dict[str, Script],
    cache: bool,
    progress: Progress,
    found: PrefixResult,
) -> None:
    mode, state_dtype = trials[0].mode, trials[0].state_dtype
    name = f"mode {mode}, state {state_dtype}, {'with' if cache else 'without'} a cache"
    with progress(f"engine, {name}"):
        engine = Engine(loaded, request.prefix_options(mode, state_dtype, context, cache))
    try:
        if cache:
            found.plans.append(_plan(mode, state_dtype, engine.plan))
        for trial in trials:
            if trial.found["error"] is None:
                with progress(f"{trial.part}, {name}"):
                    _guarded(engine, trial.found, partial(_fill, request, engine, trial, scripts))
    finally:
        engine.close()
        del engine
        _free(loaded)


def _fill(request: PrefixRequest, engine: Engine, trial: Trial, scripts: dict[str, Script]) -> None:
    """Warm up with all of a part, then run it against the clock."""
    part, cache = trial.part, engine.prefix
    if part in scripts:
        _play(engine, part, scripts[part].texts, request.args.output_tokens)
    elif trial.mode == "packed":
        scripts[part] = _write(request, engine, part)
    else:
        raise workload.RunError("packed decode, which this is checked against, did not pass its own check")
    if trial.mode not in request.modes:
        return
    if cache is not None:
        cache.clear()
        cache.stats = PrefixStats()
    gc.collect()
    said = _play(engine, part, scripts[part].texts, request.args.output_tokens)
    trial.notes += _graph_notes(engine)
    if cache is None:
        trial.cold = said
        return
    trial.warm, stats, states = said, cache.stats, cache.states.used_slots - cache.reserved
    trial.cache = dict(
        asked=stats.asked, hit_tokens=dict(kv=stats.pages_hit, state=stats.hit, usable=stats.hit),
        requests=stats.requests, requests_hit=stats.requests_hit, snapshots=stats.snapshots,
        evicted=dict(states=stats.states_evicted, pages=stats.pages_evicted),
        kept=dict(states=states, pages=cache.cached_pages),
        bytes=dict(states=states * engine.plan.kept_bytes, pages=cache.cached_pages * engine.plan.page_bytes),
    )  # fmt: skip
    cache.clear()


def _turns(args: Any, vocabulary: int) -> Asking:
    """The first turn of all conversations, then the second …"""
    chats = workload.prompts(args.conversations, args.history, vocabulary, args.seed)
    new = iter(workload.prompts(args.conversations * args.turns, args.prompt_tokens, vocabulary, args.seed + 1))
    for turn in range(args.turns):
        for chat in chats:
            if turn:
                chat += next(new)
            chat += yield list(chat)


def _shared(args: Any, vocabulary: int) -> Asking:
    (system,) = workload.prompts(1, args.system, vocabulary, args.seed + 2)
    for tail in workload.prompts(args.requests, args.prompt_tokens, vocabulary, args.seed + 3):
        yield system + tail


def _again(args: Any, vocabulary: int) -> Asking:
    (prompt,) = workload.prompts(1, args.repeat, vocabulary, args.seed + 4)
    answer = yield prompt
    yield prompt
    yield prompt + answer


ASKING: dict[str, Callable[[Any, int], Asking]] = dict(turns=_turns, shared=_shared, again=_again)


def _write(request: PrefixRequest, engine: Engine, part: str) -> Script:
    """Let packed decode without a cache answer. Raises `RunError` when its own check says that it is wrong."""
    texts: list[list[int]] = []
    said: list[Said] = []
    asking = ASKING[part](request.args, engine.vocabulary)
    text: list[int] | None = next(asking)
    while text is not None:
        texts.append(text)
        said += _ask(engine, [text], request.args.output_tokens)
        try:
            text = asking.send(said[-1].transcript.tokens)
        except StopIteration:
            text = None
    answers = [one.transcript for one in said]
    found = serving_check.reference(engine, [answers[i] for i in serving_check.checked(len(answers))])
    verdict = serving_check.judge_packed(found)
    if not verdict.ok:
        raise workload.RunError(str(verdict))
    # where all logits are small, it is the log-probabilities that are rounded most
    largest = max(abs(one.logprob) for answer in answers for one in answer.logprobs)
    rounding = max(found.rounding, torch.finfo(torch.float32).eps * largest)
    return Script(texts, replace(found, transcripts=answers, rounding=rounding))


def _play(engine: Engine, part: str, texts: list[list[int]], tokens: int) -> list[Said]:
    """All requests of a part: one after the other, but for the second of `again`."""
    if part != "again":
        return _ask(engine, texts, tokens)
    sampling = workload.params(tokens, MAX_LOGPROBS)
    workload.synchronize(engine)
    first = workload.submit(engine, texts[:1], sampling)
    workload.ramp(engine, first)
    if first[0].finished:
        raise workload.RunError("the first request ended before its prompt came again")
    second = _ask(engine, texts[1:2], tokens)
    workload.check_finished(first)
    return [*map(_said, first), *second, *_ask(engine, texts[2:], tokens)]


def _ask(engine: Engine, texts: list[list[int]], tokens: int) -> list[Said]:
    """One after the other."""
    made: list[Request] = []
    for text in texts:
        workload.synchronize(engine)
        made += workload.run(engine, [text], workload.params(tokens, MAX_LOGPROBS))
    return [_said(one) for one in made]


def _said(request: Request) -> Said:
    assert request.first_token is not None
    seconds = request.first_token - request.arrived
    return Said(Transcript(request.prompt, request.logprobs), seconds, request.cached_tokens)
