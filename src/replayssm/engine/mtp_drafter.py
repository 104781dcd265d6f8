"""Drafts by the model's own multi-token-prediction head (`replayssm.models.mtp`), many requests at once.

The head reads pairs (hidden state of a token, the token after it) and has keys and values for each. They lie in the
request's pages beside those of the model, at the place of the pair's *token*: so pages that requests share hold what
belongs to their tokens, and nobody writes behind them. The first place of a text has no pair and holds zeros, which
attention over pages counts as one more, empty pair.

Hidden states of a step stay on the device, [slots + 1, T, D], until it is known how many of its tokens are kept; the
next `propose` reads them as pairs with the tokens that were. What the head makes up further ahead goes to places that
are written again when the tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from replayssm.engine.cache import PagedLayer, Rows, chunk_mask
from replayssm.engine.request import Request
from replayssm.engine.runner import Runner
from replayssm.engine.scheduler import Chunk
from replayssm.models.mtp import MTPHead
from replayssm.state import TokenArray, on


def token_arrays(head: MTPHead) -> list[TokenArray]:
    """What the head keeps for each token."""
    heads, dim, dtype = head.config.num_key_value_heads, head.config.head_dim, head.fc.weight.dtype
    return [TokenArray(heads, dim, dtype)] * 2


def hidden_bytes(head: MTPHead, tokens: int) -> int:
    """Hidden states of one request's window of `tokens` tokens."""
    return tokens * head.config.hidden_size * head.fc.weight.element_size()


class MTPDrafter:
    """A `Drafter` that hears of every forward of `runner`. `arrays` are the head's in the pool of pages."""

    def __init__(self, head: MTPHead, runner: Runner, arrays: Sequence[Tensor], tokens: int) -> None:
        self.head, self.runner = head, runner
        layers: list[Any] = [PagedLayer(arrays, runner.cache.current)]
        self.cache = Cache(layers=layers)
        size, dtype = head.config.hidden_size, head.fc.weight.dtype
        # one more slot takes what is nobody's
        self.hidden = torch.zeros(runner.slots.slots + 1, tokens, size, dtype=dtype, device=runner.device)
        self._fresh: dict[Request, int] = {}  # hidden states of the last step that belong to kept tokens
        runner.watch(self.saw, self.read_prompt)

    def saw(self, hidden: Tensor, slots: Tensor) -> None:
        """After a decode step of rows `slots` [B]: hidden states [B·T, D]. Part of what a graph records."""
        rows = slots.shape[0]
        target = torch.where(slots >= 0, slots, self.hidden.shape[0] - 1).long()
        states = hidden.view(rows, -1, hidden.shape[-1])
        self.hidden[:, : states.shape[1]].index_copy_(0, target, states)

    def read_prompt(self, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """After chunks of one start and length: their pairs, and the hidden states [B, T, D] at their ends."""
        start, length = chunks[0].start, chunks[0].length
        slots = self.runner.slots.index([chunk.request.slot for chunk in chunks]).long()
        before = torch.cat([self.hidden[slots, :1] * self._known([c.request for c in chunks]), hidden[:, :-1]], 1)
        tokens = self.runner.up([c.request.tokens[start : start + length].tolist() for c in chunks])
        at = torch.arange(start, start + length, device=hidden.device).expand(len(chunks), -1)
        mask = chunk_mask(start, length, hidden.device).clone()
        mask[..., 1 if start == 0 else 0 :, 0] = False  # the place without a pair; its own query must see something
        mask = mask.expand(len(chunks), -1, -1, -1)
        self.head(before, tokens, self.cache, position_ids=(at - 1).clamp_min(0), attention_mask=mask)
        self.hidden[slots, 0] = hidden[:, -1]
        self._fresh.update((chunk.request, 1) for chunk in chunks)

    def follow(self, request: Request, kept: int) -> None:
        """A step of the request was read, and `kept` tokens of it stay."""
        self._fresh[request] = kept

    def forget(self, request: Request) -> None:
        """See `Drafter`."""
        self._fresh.pop(request, None)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """See `Drafter`. Requests that want none are read all the same, so that nothing is missing later."""
        with torch.inference_mode(), on(self.runner.device):
            drafts = self._propose(requests, max(most))
        return [row[:count] for row, count in zip(drafts, most, strict=True)]

    def _propose(self, requests: Sequence[Request], steps: int) -> list[list[int]]:
        runner = self.runner
        counts = [self._fresh.get(request, 1) for request in requests]
        width = max(counts)
        runner.sync_pages(requests)
        slots = runner.slots.index([request.slot for request in requests]).long()
        texts = [
            request.tokens[len(request.tokens) - n :].tolist() for request, n in zip(requests, counts, strict=True)
        ]
        tokens = runner.up([[*text, *[0] * (width - len(text))] for text in texts])
        count = runner.up(counts)
        first = runner.up([len(request.tokens) for request in requests]) - count
        step = torch.arange(width, device=runner.device)
        live = step < count[:, None]
        at = first[:, None] + torch.where(live, step, 0)
        pages = max(len(request.pages) for request in requests)
        table = runner.table[slots, :pages]
        hidden = self.hidden[slots, :width] * self._known(requests)
        out = self._read(hidden.flatten(0, 1), tokens.flatten(), at.flatten(), live.flatten(), table, width)
        last = out.view(len(requests), width, -1)[torch.arange(len(requests), device=runner.device), count - 1]
        at, everyone, drafted = first + count, torch.ones_like(count, dtype=torch.bool), []
        for i in range(steps):
            drafted.append(self.head.logits(last).argmax(-1))
            if i + 1 < steps:
                # a draft that has no page is none that will be asked for
                live = everyone & (at < runner.up([len(r.pages) for r in requests]) * runner.pages.page_size)
                last = self._read(last, drafted[-1], torch.where(live, at, 0), live, table, 1)
                at = at + 1
        if not drafted:
            return [[] for _ in requests]
        found: list[list[int]] = torch.stack(drafted, 1).tolist()
        return found

    def _known(self, requests: Sequence[Request]) -> Tensor:
        """[B, 1, 1]: 0 where a request took over a state and no hidden state, which stands in for none."""
        return self.runner.up([request in self._fresh for request in requests])[:, None, None].to(self.hidden.dtype)

    def _read(self, hidden: Tensor, tokens: Tensor, at: Tensor, live: Tensor, table: Tensor, width: int) -> Tensor:
        """The head's hidden states [N, D] for one pair [N] each, whose tokens stand at `at`."""
        slots = torch.zeros_like(at, dtype=torch.int32)
        rows = Rows("decode", slots, 0, slots, None, paged=self.runner.paged)
        with self.runner.on_pages(rows, at, live, table.repeat_interleave(width, 0)) as mask:
            if mask is not None:
                mask = mask.clone()
                mask[..., 0] &= at[:, None, None] == 0
            position = (at - 1).clamp_min(0)[:, None]
            done: Tensor = self.head(
                hidden[:, None], tokens[:, None], self.cache, position_ids=position, attention_mask=mask
            )
        return done[:, 0]
