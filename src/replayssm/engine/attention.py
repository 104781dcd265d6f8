"""Attention over pages without gathering them: flex attention with a block table, for decode steps on a GPU.

Flex attention skips what its block mask leaves out, so a mask of physical blocks is a page table: of each row the full
pages, and the last one up to the row's token. Keys and values are read where they lie, and heads that share them are
one tile. Prompts, and models that keep something else than keys and values (latents, indexers), take transformers'
SDPA on gathered contexts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from replayssm.engine.compiling import compile_shapes

NAME = "replayssm_paged"  # in transformers' table of attention functions
Q_BLOCK = 128  # flex attention's own; a decode step has one query


class Blocks(NamedTuple):
    """What B rows read, int32 but for the offset.

    The first `whole` [B] of their pages `full` [B, pages], then of the page `last` [B, pages], whose first entry alone
    counts, the tokens up to `offset` [B].
    """

    full: Tensor
    whole: Tensor
    last: Tensor
    offset: Tensor
    page_size: int


def blocks_of(table: Tensor, positions: Tensor, page_size: int) -> Blocks:
    """For the pages [B, P] of each row, whose newest token stands at `positions` [B]."""
    full = table.to(torch.int32)
    whole = (positions // page_size).to(torch.int32)
    last = full.gather(1, whole.long()[:, None])
    # flex attention takes one set of strides for both tables, so they have one shape
    return Blocks(full, whole, torch.cat([last, full[:, 1:]], 1), positions % page_size, page_size)


class _Running(threading.local):
    """The blocks of the decode step that this thread runs, None otherwise."""

    blocks: Blocks | None = None


running = _Running()


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float | None) -> Tensor:
    """Query [B, HQ, 1, D] on page arrays [1, HKV, tokens, D]; returns [B, HQ, 1, D]."""
    full, whole, last, offset, size = blocks
    one = torch.ones_like(whole)

    def seen(b: Tensor, h: Tensor, q: Tensor, at: Tensor) -> Tensor:
        return at % size <= offset[b]  # asked in the last page only

    mask = BlockMask(
        (1, key.shape[2]), one[:, None, None], last[:, None, None], whole[:, None, None], full[:, None, None],
        None, None, None, None, (Q_BLOCK, size), seen,
    )  # fmt: skip
    out: Any = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    done: Tensor = out
    return done


_compiled: list[Callable[..., Tensor]] = []


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """For transformers: [B, HQ, T, D] in, [B, T, HQ, D] out."""
    if running.blocks is None:
        done: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return done
    if not _compiled:
        # one compilation per batch bucket: with symbolic sizes the kernel is several times slower
        _compiled.append(compile_shapes(attend, dynamic=False))
    return _compiled[0](query, key, value, running.blocks, scaling).transpose(1, 2), None


def register() -> str:
    """Make it known to transformers; returns its name there."""
    AttentionInterface.register(NAME, paged_attention)
    return NAME
