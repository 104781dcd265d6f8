"""The engine: requests go in, steps run, tokens come out. One thread drives it; nothing in it is locked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count
from operator import index
from typing import Any

from replayssm.engine.drafters import Drafter, NgramDrafter
from replayssm.engine.grammar import Grammars
from replayssm.engine.mtp_drafter import MTPDrafter
from replayssm.engine.options import BUFFERS, EngineOptions
from replayssm.engine.pace import DraftPace
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Logprob, Reason, Request, Saved
from replayssm.engine.runner import Flight, Result, Runner, needs_history
from replayssm.engine.scheduler import Chunk, Scheduler, Step
from replayssm.engine.setup import EngineParts, build
from replayssm.engine.stats import EngineStats
from replayssm.engine.text import TextStream
from replayssm.errors import OptionError, PromptError
from replayssm.models.loading import LoadedModel
from replayssm.models.parallel import random_bits, ranks_of
from replayssm.state.prefix import PrefixCache

log = logging.getLogger(__name__)
Listener = Callable[[Request, str], None]


class Engine:
    """Decodes many requests at once. `add` them, `step` until `idle`.

    Args:
        loaded: what `replayssm.load_model` returns, or the parts of it that are needed (`replayssm.engine.setup`).
        options: see `EngineOptions`.

    A listener given to `add` is called as `listener(request, new_text)` after every token, and once more, with what
    text was held back, when the request has finished.
    """

    def __init__(self, loaded: LoadedModel, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        parts: EngineParts = build(loaded, self.options)
        self.plan, self.context, self.stops = parts.plan, parts.context, parts.stops
        self.tokenizer, self.vocabulary = loaded.tokenizer, parts.vocabulary
        self.slots, self.pages, self._close = parts.slots, parts.pages, parts.close
        self.runner = Runner(
            loaded.model, self.slots, self.pages, parts.linear, self.vocabulary, self.stops,
            self.pages.pages_for(self.context), self.options.mode, self.options.snapshot_interval,
            parts.gathered_tokens, parts.graphs, parts.paged, parts.windows,
        )  # fmt: skip
        self.drafter: Drafter | None = NgramDrafter() if self.options.spec == "ngram" else None
        if parts.head is not None:
            self.drafter = MTPDrafter(parts.head, self.runner, self.pages.arrays[-1], self.options.window)
        # ranks measure different times, and must draft alike
        self.pace = DraftPace(self.options.spec_tokens, self.options.spec_adaptive and ranks_of(loaded.model) is None)
        self._buffers = BUFFERS if self.options.prefix_strategy == "extra_buffer" else 0
        self.prefix = None if parts.states is None else PrefixCache(self.slots, self.pages, parts.states)
        if self.prefix is not None:
            self.runner.keep = self._keep_chunk
        self.scheduler = Scheduler(
            self.slots, self.pages, self.options.chunk_tokens, self._preempt, self._restore, self.drain, self._adopt,
            self.prefix, self.options.prefix_interval, self._buffers,
        )  # fmt: skip
        on_gpu = self.slots.device.type == "cuda"
        self.overlap = on_gpu if self.options.overlap is None else self.options.overlap
        if self.options.spec is not None:
            self.overlap = False  # what comes next depends on how many drafts were right
        self._flight: Flight | None = None
        self._ids, self._random_bits = count(), random_bits(loaded.model)
        self._listeners: dict[Request, Listener] = {}
        self.steps = 0
        self.stats = EngineStats()
        self.grammars = Grammars(self.tokenizer, self.vocabulary, self.stops)

    def close(self) -> None:
        """Give the model back as it was."""
        self.runner.close()
        self._close()

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        listener: Listener | None = None,
    ) -> Request:
        """`make` a request and `submit` it."""
        request = self.make(prompt, params)
        self.submit(request, listener)
        return request

    def make(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Request:
        """Check a prompt, a text or token ids. Any thread may call it; nothing of the engine changes.

        Raises `PromptError` or `OptionError` with the numbers when it can never run.
        """
        params = params or SamplingParams()
        params.check_vocabulary(self.vocabulary)
        if params.stop and self.tokenizer is None:
            raise OptionError(f"stop {list(params.stop)} needs a tokenizer, and the model has none; use stop_token_ids")
        if params.grammar is not None and self.tokenizer is None:
            raise OptionError("grammar needs a tokenizer, and the model has none")
        tokens = self._tokens(prompt)
        limit = min(len(tokens) + params.max_tokens, self.context)
        if len(tokens) >= self.context:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and leaves no room for an answer in a context of {self.context}; "
                "shorten it"
            )
        if self.pages.pages_for(limit) > self.pages.pages:
            raise PromptError(
                f"{len(tokens)} prompt tokens and up to {limit - len(tokens)} more need {self.pages.pages_for(limit)} "
                f"pages of {self.pages.page_size} tokens, all there are is {self.pages.pages}; ask for fewer "
                "(max_tokens), or give the engine more memory"
            )
        seed = params.seed if params.seed is not None else self._random_bits(63)
        request = Request(next(self._ids), tokens, params, seed, limit=limit)
        request.stream = self._stream(params)
        if params.grammar is not None:
            request.matcher = self.grammars.matcher(params.grammar, params.ignore_eos)
        return request

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue what `make` returned.

        The outputs 1 … n-1 of a request reach the same listener; this one is their `parent`.
        """
        if listener is not None:
            self._listeners[request] = listener
        self.scheduler.waiting.append(request)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not (self.scheduler.waiting or self.scheduler.running or self._flight)

    def step(self) -> None:
        """Run one step. With `overlap`, the tokens of the step before are read while it runs."""
        if self.overlap and needs_history(self.scheduler.running):
            self.drain()
        step = self.scheduler.schedule()
        flight = None
        if step:
            started = time.perf_counter()
            try:
                flight = self.runner.launch(step, self._drafts(step))
            except BaseException as error:  # the others go on; what this step left in slots and pages is nobody's
                taken = [*step.decode, *(one for chunk in step.prefill for one in chunk.requests)]
                for request in taken:
                    request.computed = 0  # the state may be ahead of it, so nobody may keep that
                self.drain()
                self._fail(taken, error)
                if not isinstance(error, Exception):
                    raise
            self.steps += 1
            self.stats.step(step)
        before, self._flight = self._flight, flight
        self._collect(before)
        if not self.overlap:
            self.drain()
        if self.options.spec is not None and flight is not None and not step.prefill:
            self.pace.measured(len(step.decode), flight.width, time.perf_counter() - started)

    def drain(self) -> None:
        """Read the tokens that are in flight."""
        flight, self._flight = self._flight, None
        self._collect(flight)

    def run(self) -> None:
        """Step until idle."""
        while not self.idle:
            self.step()

    def abort(self, request: Request) -> None:
        """End a request at whatever phase it is, its forks too. What it has so far stays."""
        for one in [*self.scheduler.waiting, *self.scheduler.running]:
            if one is request or one.parent is request:
                self._finish(one, "abort")
        if not request.finished:
            self._finish(request, "abort")

    def abort_all(self) -> None:
        """End everything."""
        for request in [*self.scheduler.waiting, *self.scheduler.running]:
            self._finish(request, "abort")
        self.drain()

    def _drafts(self, step: Step) -> dict[Request, list[int]]:
        """Tokens that may follow the newest one of the requests that decode, with pages for them."""
        if self.drafter is None or not step.decode:
            return {}
        most = [self.scheduler.stretch(one, self._room(one, len(step.decode))) for one in step.decode]
        return dict(zip(step.decode, self.drafter.propose(step.decode, most), strict=True))

    def _room(self, request: Request, rows: int) -> int:
        """Drafts that a request may have. Penalties and grammars depend on every token, so theirs are none."""
        if needs_history([request]):
            return 0
        return max(0, min(self.pace.wanted(request, rows), request.limit - request.length - 1))

    def _collect(self, flight: Flight | None) -> None:
        if flight is None:
            return
        results = flight.results()
        now = time.perf_counter()
        # All tokens are entered before any window is kept, and all windows before anybody hears of a token: who hears
        # may end requests, and a state that is left behind must be that of the tokens.
        entered = [(result, self._enter(result, now)) for result in results]
        if flight.window is not None:
            self.runner.commit(flight.window, [kept for result, (kept, _, _) in entered if result.drafts is not None])
        for result, (kept, text, reason) in entered:
            request = result.request
            if request.finished:  # it ended while this step was on its way, or since
                continue
            if request.error is not None:
                self._finish(request, "error")
            elif reason is not None:
                self._finish(request, reason, text)
            else:
                self._go_on(request, kept, text)

    def _enter(self, result: Result, now: float) -> tuple[int, str, Reason | None]:
        """Append the tokens of a row up to its end; returns how many, their text, and the reason for the end."""
        request, text = result.request, ""
        if request.finished:
            return 0, "", None
        kept = 0
        try:
            for token, logprob in zip(result.tokens, result.logprobs, strict=True):
                kept += 1
                new, reason = self._append(request, token, logprob, now)
                text += new
                if reason is not None:
                    return kept, text, reason
        except Exception as error:  # one request's trouble must not become the others'
            request.error = f"{type(error).__name__}: {error}"
        finally:
            if result.drafts:
                right = min(kept, len(result.tokens) - 1)
                request.drafted += len(result.drafts)
                request.drafts_kept += right
                self.pace.learn(request, len(result.drafts), right)
                self.stats.drafts(len(result.drafts), right)
        return kept, text, None

    def _append(self, request: Request, token: int, logprob: Logprob | None, now: float) -> tuple[str, Reason | None]:
        """One token more; its text, and the reason if it ends the request."""
        self.stats.token(request, now)
        request.tokens.append(token)
        request.first_token = request.first_token or now
        request.last_token = now
        if logprob is not None:
            request.logprobs.append(logprob)
        made = len(request.output)
        ends = token in self.runner.enders(request.params) and made >= request.params.min_tokens
        text = ""
        if request.stream is not None and not ends:
            text = request.stream.push(token, may_stop=made >= request.params.min_tokens)
            ends = request.stream.stopped is not None
        if request.matcher is not None:
            ends = request.matcher.accept(token) or ends
        full = len(request.tokens) >= request.limit
        return text, "stop" if ends else "length" if full else None

    def _go_on(self, request: Request, kept: int, text: str) -> None:
        """After `kept` tokens that did not end it: keep a state where it is due, and tell the listener."""
        interval = self.options.prefix_interval
        # windows may step over the multiple
        if self.prefix is not None and request.computed // interval > (request.computed - kept) // interval:
            self._keep(request, request.computed)
        if self.drafter is not None:
            self.drafter.follow(request, kept)
        if (listener := self._listeners.get(request)) is not None:
            try:
                listener(request, text)
            except Exception as error:  # one request's trouble must not become the others'
                self._fail([request], error)

    def _keep_chunk(self, chunk: Chunk) -> None:
        """Keep the state behind a chunk of a prompt."""
        end = chunk.start + chunk.length
        if chunk.last or end % self.options.prefix_interval == 0:
            self._keep(chunk.request, end)

    def _keep(self, request: Request, computed: int, give: bool = False) -> None:
        """Put the state after `computed` tokens, which is that in the slot now, into the prefix cache.

        With `give` the request leaves, and the policy says how much of it stays.
        """
        if self.prefix is None or request.slot < 0:
            return
        folded = give and self.slots.folded_conv is not None and request.slot in self.runner.ringed
        if folded:
            computed -= self.runner.meter.fill.get(request.slot, 0)
        # a state that holds a token which nobody has read yet has no key
        if 0 < computed <= len(request.tokens):
            pages = request.pages[: self.pages.pages_for(computed)]
            self.prefix.insert(request.tokens[:computed], pages, request.slot, give, folded, request.buffers)
            if not give:
                request.buffers += self.prefix.reserve(self._buffers - len(request.buffers))

    def _finish(self, request: Request, reason: Reason, text: str = "") -> None:
        if request.stream is not None and reason != "error":
            try:
                text += request.stream.finish()
            except Exception as error:
                self._fail([request], error)
                return
        slot, request.reason = request.slot, reason  # a reader in another thread sees the reason when it sees the end
        if reason != "error":
            self._keep(request, request.computed, give=True)
        self.scheduler.finish(request)
        if slot >= 0:
            self.runner.forget(slot)
        self._forget(request)
        self.stats.finish(request, reason, time.perf_counter())
        if (listener := self._listeners.pop(request, None)) is not None:
            try:
                listener(request, text)
            except Exception:  # the request has ended, and nothing is left that could hear of it
                log.exception("the listener of %s failed", request)

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        for request in requests:
            if not request.finished:
                request.error = f"{type(error).__name__}: {error}"
                self._finish(request, "error")

    def _preempt(self, request: Request) -> None:
        if self.options.preempt == "offload" and request.computed:
            self.runner.flush([request.slot])
            state = self.slots.offload(request.slot)
            pages = self.pages.pages_for(request.computed)
            request.saved = Saved(state, self.pages.offload(request.pages[:pages]), request.computed)
        elif request.computed:
            self._keep(request, request.computed, give=True)
        request.computed = 0
        self.runner.forget(request.slot)
        self._forget(request)
        self.scheduler.release(request)

    def _forget(self, request: Request) -> None:
        """A request left: so do its drafts' tables."""
        self.pace.forget(request)
        if self.drafter is not None:
            self.drafter.forget(request)

    def _restore(self, request: Request) -> None:
        saved, request.saved = request.saved, None
        assert saved is not None
        self.slots.restore(request.slot, saved.state)
        self.pages.restore(request.pages[: self.pages.pages_for(saved.computed)], saved.pages)
        request.computed = saved.computed

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise OptionError("a prompt in words needs a tokenizer, and the model has none; give token ids")
            ids: Any = self.tokenizer.encode(prompt)
            tokens = list(ids)
        else:
            try:
                tokens = [index(token) for token in prompt]
            except TypeError as error:
                raise PromptError(f"a prompt is a text or whole numbers: {error}") from None
            for token in tokens:
                if not 0 <= token < self.vocabulary:
                    raise PromptError(f"prompt token {token} is outside 0…{self.vocabulary - 1}")
        if not tokens:
            raise PromptError("the prompt is empty; give at least one token")
        return tokens

    def _adopt(self, child: Request) -> None:
        """A fork streams like its parent, to the same listener."""
        child.stream = self._stream(child.params)
        if child.parent is not None and child.parent.matcher is not None:
            child.matcher = child.parent.matcher.fork()
        if child.parent is not None and (listener := self._listeners.get(child.parent)) is not None:
            self._listeners[child] = listener

    def _stream(self, params: SamplingParams) -> TextStream | None:
        return None if self.tokenizer is None else TextStream(self.tokenizer, params.stop)
