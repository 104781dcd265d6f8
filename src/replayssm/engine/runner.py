"""One step on the device: decode rows, chunks of prompts, tokens sampled from their logits.

`launch` only enqueues work. Nothing waits for the device until `Flight.tokens` is read, so that the next step can be
prepared meanwhile; a decode step takes the tokens of the step before from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import ops
from replayssm.engine import attention, grammar
from replayssm.engine.cache import EngineCache, Rows, chunk_mask
from replayssm.engine.graphs import SMALLEST_CONTEXT, DecodeInputs, Graphs, WindowInputs
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Logprob, Request
from replayssm.engine.sampler import Batch, History, Sampled, prepare, sample
from replayssm.engine.scheduler import Chunk, Step
from replayssm.engine.stats import RingMeter
from replayssm.engine.windows import Windows
from replayssm.kernels.policy import Route
from replayssm.state import PagePool, SlotPool, on, upload

Drafts = Mapping[Request, Sequence[int]]


class Row(NamedTuple):
    """A request in a step: one logit row, or with a window one for the newest token and one for each draft behind it;
    `width` is that of the step's windows."""

    request: Request
    width: int = 1
    drafts: Sequence[int] | None = None


class Result(NamedTuple):
    """What the sampler made of a row: its tokens, with logprobs where asked for.

    Of a window, which has `drafts`, these are the drafts that are right and one token more. None of it is kept before
    `Runner.commit`.
    """

    request: Request
    tokens: list[int]
    logprobs: list[Logprob | None]
    drafts: Sequence[int] | None


class Open(NamedTuple):
    """Windows that wait for `commit`: of `requests`, `width` tokens each of which `lengths` [B] count."""

    requests: list[Request]
    slots: Tensor
    lengths: Tensor
    width: int


class Flight:
    """A launched step. Reading its tokens waits for the device."""

    def __init__(self, rows: list[Row], sampled: Sampled, window: Open | None = None) -> None:
        self.rows, self.window = rows, window
        self._parts = [None if x is None else x.to("cpu", non_blocking=True) for x in sampled]
        self._done = None
        if sampled.tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def tokens(self) -> list[int]:
        """What was sampled from each row of logits."""
        if self._done is not None:
            self._done.synchronize()
        assert self._parts[0] is not None
        found: list[int] = self._parts[0].tolist()
        return found

    @property
    def width(self) -> int:
        """Tokens of its windows, 1 for none."""
        return 1 if self.window is None else self.window.width

    def results(self) -> list[Result]:
        """Of each row."""
        tokens, found, at = self.tokens(), [], 0
        for request, width, drafts in self.rows:
            made = 1
            for draft, token in zip(drafts or (), tokens[at : at + width], strict=False):
                if draft != token:
                    break
                made += 1
            logprobs = [self._logprob(row, tokens[row], request) for row in range(at, at + made)]
            found.append(Result(request, tokens[at : at + made], logprobs, drafts))
            at += width
        return found

    def _logprob(self, row: int, token: int, request: Request) -> Logprob | None:
        (_, chosen, top_tokens, top_logprobs), wanted = self._parts, request.params.logprobs
        if wanted is None or chosen is None or top_tokens is None or top_logprobs is None:
            return None
        top = zip(top_tokens[row, :wanted].tolist(), top_logprobs[row, :wanted].tolist(), strict=True)
        return Logprob(token, float(chosen[row]), tuple(top))


class Runner:
    """Runs steps of `model` on the pools. `stops` are the tokens that end a text by the model's own account."""

    def __init__(
        self,
        model: Any,
        slots: SlotPool,
        pages: PagePool,
        linear: Sequence[bool],
        vocabulary: int,
        stops: frozenset[int],
        max_pages: int,
        mode: str = "auto",
        snapshot_interval: int = 0,
        gathered_tokens: int = 2**62,
        graphs: bool = False,
        paged: bool = False,
        windows: Windows | None = None,
    ) -> None:
        self.model, self.slots, self.pages = model, slots, pages
        self.vocabulary, self.stops, self.mode, self.interval = vocabulary, stops, mode, snapshot_interval
        self.device = slots.device
        self.cache = EngineCache(linear, slots, pages)
        self.last_token = torch.zeros(slots.slots, dtype=torch.int64, device=self.device)
        # pages of each slot's request; what lies behind its last page is never read
        self.table = torch.full((slots.slots, max_pages), pages.zeros, dtype=torch.int64, device=self.device)
        self.gathered_tokens, self.max_pages, self.paged = gathered_tokens, max_pages, paged
        self.graphs: Graphs | None = None
        if graphs:
            # pages that are read where they lie cost nothing when they are not there
            least = max_pages if paged else -(-SMALLEST_CONTEXT // pages.page_size)
            self.graphs = Graphs(self.decode_forward, slots.slots, least, max_pages, self.device, self.window_forward)
        self.windows = windows
        self._hidden: Any = None  # of the last forward, where somebody watches
        self._saw: Callable[[Tensor, Tensor], None] | None = None
        self._read_prompt: Callable[[Tensor, Sequence[Chunk]], None] | None = None
        self.keep: Callable[[Chunk], None] | None = None  # is told of every chunk, when its state is in the slot
        self.ringed: set[int] = set()  # slots whose ring may hold records
        self.meter = RingMeter(slots, snapshot_interval)
        self._batch: tuple[tuple[tuple[int, int, int], ...], Batch] | None = None

    def watch(
        self, saw: Callable[[Tensor, Tensor], None], read_prompt: Callable[[Tensor, Sequence[Chunk]], None]
    ) -> None:
        """Show the model's last hidden states: `saw` those of decode rows, [B·width, D] with their slots [B], in the
        middle of what graphs record; `read_prompt` those of chunks [B, T, D]."""
        self._saw, self._read_prompt = saw, read_prompt

        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state

        self._unwatch = self.model.get_decoder().register_forward_hook(keep)

    def close(self) -> None:
        """Let go of the model."""
        if self._saw is not None:
            self._unwatch.remove()

    def launch(self, step: Step, drafts: Drafts | None = None) -> Flight | None:
        """Enqueue a step and move its requests on. None when no token is sampled in it.

        With `drafts`, tokens that may follow the newest one, decode rows are windows, if all of them run together; the
        requests then move on by `commit`.
        """
        with torch.inference_mode(), on(self.device):
            return self._launch(step, drafts or {})

    def _launch(self, step: Step, drafts: Drafts) -> Flight | None:
        rows: list[Row] = []
        logits: list[Tensor] = []
        parts, window = self._parts(step.decode), None
        width = self._width(step.decode, drafts)
        if width > 1:
            parts = []
            found, window = self._verify(step.decode, drafts, width)
            logits.append(found)
            rows += [Row(request, width, drafts.get(request, ())) for request in step.decode]
        for part in parts:
            found = self._decode(part)
            # the next part may be a replay of the same graph, which writes its logits to the same place
            logits.append(found if len(parts) == 1 else found.clone())
            rows += map(Row, part)
        for _, group in groupby(step.prefill, key=lambda chunk: (chunk.start, chunk.length)):
            chunks = list(group)
            last = self._prefill(chunks)
            for row, chunk in enumerate(chunks):
                if self.keep is not None:
                    self.keep(chunk)
                if chunk.last:
                    self._fork(chunk)
                    takers = chunk.requests
                    logits.append(last[row].expand(len(takers), -1))
                    rows += map(Row, takers)
        for request in step.decode if window is None else ():
            request.computed += 1
        for chunk in step.prefill:
            chunk.request.computed += chunk.length
        if not rows:
            return None
        sampled = self._sample(rows, logits[0] if len(logits) == 1 else torch.cat(logits))
        if window is None:  # whoever verifies windows reads every token before the next step
            self.last_token.index_copy_(0, self.up([row.request.slot for row in rows]), sampled.tokens)
        for one in rows:
            one.request.length += one.drafts is None
        return Flight(rows, sampled, window)

    def commit(self, window: Open, accepted: Sequence[int]) -> None:
        """Keep the first `accepted` tokens of each window of a step, and move the requests on by as many."""
        assert self.windows is not None
        with torch.inference_mode(), on(self.device):
            kept = upload(accepted, torch.int32, self.device)
            self.windows.commit(window.slots, window.lengths, kept, window.width, self.slots.spec)
        self.meter.commit(window.requests, accepted)
        for request, count in zip(window.requests, accepted, strict=True):
            request.computed += count
            request.length += count

    def _width(self, requests: Sequence[Request], drafts: Drafts) -> int:
        """Tokens of the windows of a step, 1 for none: steps of few widths share their graphs."""
        longest = 1 + max((len(drafts.get(request, ())) for request in requests), default=0)
        if self.windows is None or longest == 1 or not self._fits(requests, longest):
            return 1
        return min(self.windows.tokens, longest if self.graphs is None else 1 << (longest - 2).bit_length() | 1)

    def _fits(self, requests: Sequence[Request], width: int = 1) -> bool:
        """Whether the contexts of these requests can be gathered at once, one for each token."""
        most = self._pages(max((len(r.pages) for r in requests), default=0))
        return self.paged or len(requests) * width * most * self.pages.page_size <= self.gathered_tokens

    def _parts(self, requests: list[Request]) -> list[list[Request]]:
        """Requests that decode together: all of them, unless their contexts are too much to gather at once."""
        if self._fits(requests):
            return [requests] if requests else []
        parts: list[list[Request]] = [[]]
        for request in sorted(requests, key=lambda r: len(r.pages), reverse=True):
            longest = self._pages(len((parts[-1] or [request])[0].pages))
            if parts[-1] and (len(parts[-1]) + 1) * longest * self.pages.page_size > self.gathered_tokens:
                parts.append([])
            parts[-1].append(request)
        return parts

    def _pages(self, pages: int) -> int:
        return pages if self.graphs is None else self.graphs.pages(pages)

    def _decode(self, requests: list[Request]) -> Tensor:
        """Logits [B, vocabulary] of one more token of each."""
        rows = len(requests)
        route = self._route(rows if self.graphs is None else self.graphs.bucket(rows))
        slots = [request.slot for request in requests]
        if route == "replay":
            self.slots.keep_conv([slot for slot in slots if slot not in self.ringed])
            self.ringed.update(slots)
            self.meter.replay(requests)
        else:
            self.flush(slots)
            self.meter.packed(rows)
        self.sync_pages(requests)
        inputs = DecodeInputs(
            self.up([r.tokens[r.length - 1] if len(r.tokens) == r.length else -1 for r in requests]),
            self.up([request.length - 1 for request in requests]),
            self.slots.index(slots),
        )
        pages = max(len(request.pages) for request in requests)
        return (self.decode_forward if self.graphs is None else self.graphs.run)(inputs, pages, route)

    def _verify(self, requests: list[Request], drafts: Drafts, width: int) -> tuple[Tensor, Open]:
        """Logits [B · width, vocabulary] behind the newest token of each request and behind its drafts."""
        assert self.windows is not None
        slots, lengths = [request.slot for request in requests], [1 + len(drafts.get(r, ())) for r in requests]
        if self.windows.strategy == "ring":
            self.ringed.update(slots)
        else:
            self.flush(slots)
        self.meter.window(requests, lengths, self.windows.strategy)
        self.sync_pages(requests)
        texts = [[request.tokens[request.length - 1], *drafts.get(request, ())] for request in requests]
        inputs = WindowInputs(
            self.up([[*text, *[0] * (width - len(text))] for text in texts]),
            self.up([request.length - 1 for request in requests]),
            self.slots.index(slots),
            upload(lengths, torch.int32, self.device),
        )
        pages = max(len(request.pages) for request in requests)
        found = (self.window_forward if self.graphs is None else self.graphs.run)(inputs, pages, "replay")
        return found, Open(requests, inputs.slots, inputs.lengths, width)

    def sync_pages(self, requests: Sequence[Request]) -> None:
        """Tell the device about pages that are new since the request's last step."""
        new = [(r.slot, i, r.pages[i]) for r in requests for i in range(r.synced, len(r.pages))]
        if new:
            slot, place, page = zip(*new, strict=True)
            self.table.index_put_((self.up(slot), self.up(place)), self.up(page))
            for request in requests:
                request.synced = len(request.pages)

    def up(self, values: Sequence[Any]) -> Tensor:
        """Whole numbers on the device, int64."""
        return upload(values, torch.int64, self.device)

    def decode_forward(self, inputs: DecodeInputs, pages: int, route: Route) -> Tensor:
        """The decode step on the device alone, for contexts of up to `pages` pages: nothing depends on values."""
        positions, slots = inputs.positions, inputs.slots
        own = slots.clamp_min(0).long()
        tokens = torch.where(inputs.tokens < 0, self.last_token[own], inputs.tokens)
        cursor = force = None
        if route == "replay":
            cursor = ops.gather_cursors(self.slots.cursor, slots)
            force = self._flushing(positions, slots)
        rows = Rows("decode", slots, 0, slots, None, cursor, route, force, self.paged)
        with self.on_pages(rows, positions, slots >= 0, self.table[own, :pages]) as mask:
            logits = self._forward(tokens[:, None], positions[:, None], mask)
        if self._saw is not None:
            self._saw(self._hidden[:, 0], slots)
        if route == "replay":
            assert self.slots.ring_len is not None
            ops.advance_cursors(self.slots.cursor, slots, self.slots.ring_len, force)
            self.slots.keep_folded_conv(slots)
        return logits

    def window_forward(self, inputs: WindowInputs, pages: int, route: Route) -> Tensor:
        """The same for windows; logits [B · width, vocabulary]. To attention each token is a row of its own."""
        slots, width = inputs.slots, inputs.width
        step = torch.arange(width, device=self.device)
        live = (slots >= 0)[:, None] & (step < inputs.lengths[:, None])
        positions = inputs.positions[:, None] + torch.where(live, step, 0)
        table = self.table[slots.clamp_min(0).long(), :pages].repeat_interleave(width, 0)
        cursor = ops.gather_cursors(self.slots.cursor, slots)
        rows = Rows(
            "decode", slots, 0, slots, None, cursor, route, paged=self.paged, windows=self.windows,
            lengths=inputs.lengths,
        )  # fmt: skip
        with self.on_pages(rows, positions.flatten(), live.flatten(), table) as mask:
            logits = self._forward(inputs.tokens.view(-1, 1), positions.view(-1, 1), mask)
        if self._saw is not None:
            self._saw(self._hidden[:, 0], slots)
        return logits

    @contextmanager
    def on_pages(self, rows: Rows, positions: Tensor, live: Tensor, table: Tensor) -> Iterator[Tensor | None]:
        """For a forward of one token in each row [N], of requests whose pages are `table` [N, P]: what attention reads.
        Yields its mask [N, 1, 1, S]."""
        size = self.pages.page_size
        page = table.gather(1, (positions // size)[:, None])[:, 0]
        rows.write = torch.where(live, page, self.pages.trash) * size + positions % size
        mask = None
        if self.paged:
            attention.running.blocks = attention.blocks_of(table, positions, size)
        else:
            at = torch.arange(table.shape[1] * size, device=self.device)
            seen = at <= positions[:, None]
            every = table.repeat_interleave(size, 1) * size + at % size
            rows.read = torch.where(seen & live[:, None], every, self.pages.zeros * size)
            mask = seen[:, None, None]
        self.cache.current.rows = rows
        try:
            yield mask
        finally:
            attention.running.blocks = None

    def _flushing(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Rows [B] int32 that fold at this step, whatever their cursors: at a phase of their own, and for snapshots.

        Requests that start together would fill their rings together and fold in one slow step. After the first fold at
        its phase, a row's ring is full exactly when the phase comes again, so this costs one early fold a request.
        """
        assert self.slots.ring_len is not None
        force = ((positions + slots) % self.slots.ring_len == 0).to(torch.int32)
        if self.interval:
            force |= ops.force_flush_mask(positions + 1, self.interval, slots)
        return force

    def _prefill(self, chunks: list[Chunk]) -> Tensor:
        """Logits [B, vocabulary] after chunks of one start and length."""
        start, length = chunks[0].start, chunks[0].length
        slots = [chunk.request.slot for chunk in chunks]
        if start:
            self.flush(slots)
        size = self.pages.page_size
        tables = [chunk.request.pages[: self.pages.pages_for(start + length)] for chunk in chunks]
        pages = self.up(tables)
        at = torch.arange(start + length, device=self.device)
        read = pages[:, at // size] * size + at % size
        write = read[:, start:].flatten()
        rows = Rows("prefill", self.slots.index(slots), start, write, read if start else None)
        self.cache.current.rows = rows
        tokens = self.up([c.request.tokens[start : start + length].tolist() for c in chunks])
        positions = at[start:].expand(len(chunks), -1)
        mask = chunk_mask(start, length, self.device).expand(len(chunks), -1, -1, -1)
        logits = self._forward(tokens, positions, mask)
        if self._read_prompt is not None:
            self._read_prompt(self._hidden, chunks)
        return logits

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        out = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = out.logits[:, -1]
        return logits

    def _fork(self, chunk: Chunk) -> None:
        """Copy state and the last, part-filled pages to the forks of a prompt that was just computed."""
        parent = chunk.request
        for child in chunk.forks:
            self.slots.copy(parent.slot, child.slot)
            for mine, theirs in zip(parent.pages, child.pages, strict=True):
                if mine != theirs:
                    self.pages.copy(mine, theirs)
            child.computed = parent.computed + chunk.length

    def _route(self, rows: int) -> Route:
        if self.slots.ring_len is None or self.mode == "packed":
            return "packed"
        if self.windows is not None and self.windows.strategy != "ring":
            return "packed"  # its ring is for windows
        if self.mode == "replay":
            return "replay"
        return ops.decode_route(self.slots.state, self.slots.ring_len, rows, self.slots.spec.is_kda)

    def flush(self, slots: Sequence[int]) -> None:
        """Fold rings that may hold something."""
        full = [slot for slot in slots if slot in self.ringed]
        if full:
            self.slots.flush(full)
            self.meter.flush(full)
            self.ringed.difference_update(full)

    def forget(self, slot: int) -> None:
        """A slot was given back: whatever its ring holds is nobody's."""
        self.ringed.discard(slot)
        self.meter.forget(slot)

    def _sample(self, wide: list[Row], logits: Tensor) -> Sampled:
        """A token for each row of logits."""
        key = tuple((row.request.id, row.request.index, row.width) for row in wide)
        rows = [row.request for row in wide for _ in range(row.width)]
        if self._batch is None or self._batch[0] != key:
            params = [row.params for row in rows]
            self._batch = key, prepare(params, [row.seed for row in rows], self.device)
        batch = self._batch[1]
        generated = [row.request.generated + i for row in wide for i in range(row.width)]
        positions = self.up(generated)
        history = self._history(rows) if batch.penalised else None
        forbidden = self._forbidden(rows, generated)
        if matchers := [(row, r.matcher) for row, r in enumerate(rows) if r.matcher is not None]:
            ruled_out = grammar.forbidden(matchers, len(rows), self.vocabulary, self.device)
            forbidden = ruled_out if forbidden is None else forbidden | ruled_out
        return sample(logits, batch, positions, history, forbidden)

    def _history(self, rows: list[Request]) -> History:
        """What the rows have seen, built anew; the engine fetches every token first when a row has a penalty."""
        prompt = torch.zeros(len(rows), self.vocabulary, dtype=torch.bool)
        output = torch.zeros(len(rows), self.vocabulary, dtype=torch.int32)
        for row, request in enumerate(rows):
            if _penalised(request.params):
                prompt[row, torch.tensor(request.prompt)] = True
                made = torch.tensor(request.output, dtype=torch.int64)
                output[row].index_add_(0, made, torch.ones(len(made), dtype=torch.int32))
        return History(prompt.to(self.device), output.to(self.device))

    def _forbidden(self, rows: list[Request], generated: Sequence[int]) -> Tensor | None:
        """Tokens that would end a row before its `min_tokens`."""
        early = [(row, r) for row, r in enumerate(rows) if generated[row] < r.params.min_tokens]
        pairs = [(row, token) for row, r in early for token in self.enders(r.params)]
        if not pairs:
            return None
        at = tuple(self.up(index) for index in zip(*pairs, strict=True))
        mask = torch.zeros(len(rows), self.vocabulary, dtype=torch.bool, device=self.device)
        return mask.index_put_(at, torch.ones((), dtype=torch.bool, device=self.device))

    def enders(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output with these parameters."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stops)


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def needs_history(requests: Sequence[Request]) -> bool:
    """Whether a step with these requests must know every token that came before."""
    return any(_penalised(request.params) or request.matcher is not None for request in requests)
