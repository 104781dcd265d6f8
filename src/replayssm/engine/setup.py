"""What an engine needs of a model, found out once: what each layer keeps for a token, and how the memory is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from replayssm.engine import attention
from replayssm.engine.fuse import fuse
from replayssm.engine.mtp_drafter import hidden_bytes, token_arrays
from replayssm.engine.options import BUFFERS, EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.engine.sampler import History, prepare, sample
from replayssm.engine.windows import Windows
from replayssm.errors import DeviceError, OptionError, UnsupportedModelError
from replayssm.models.enable import enable
from replayssm.models.layers import ReplayMixin
from replayssm.models.loading import LoadedModel
from replayssm.models.mtp import MTPHead, load_mtp
from replayssm.models.parallel import least, most, ranks_of
from replayssm.spec import LayerSpec, ring_of
from replayssm.state import MemoryPlan, PagePool, SlotPool, TokenArray, on, plan_memory

GIB = 2**30
CPU_BESIDES_WEIGHTS = 4 * GIB
MOST_REQUESTS = {"cuda": 256, "cpu": 32}
PAGE_SIZES = {"cuda": 64, "cpu": 16}
GATHERED_TOKENS = 2**19  # contexts of a decode step together
GATHERED_SHARE = 0.08  # of the budget, for them; one longest context must fit in any case
PROBE_TOKENS = 4096


class Layers(NamedTuple):
    """Which layers of a model are linear, and what the others keep for a token."""

    linear: list[bool]
    arrays: list[list[TokenArray]]


@dataclass(frozen=True)
class EngineParts:
    """Pools and facts for the runner; `close` gives the model back as it was."""

    plan: MemoryPlan
    slots: SlotPool
    states: SlotPool | None
    pages: PagePool
    linear: list[bool]
    context: int
    vocabulary: int
    stops: frozenset[int]
    gathered_tokens: int
    graphs: bool
    paged: bool
    windows: Windows | None
    head: MTPHead | None
    close: Callable[[], None]


def build(loaded: LoadedModel, options: EngineOptions) -> EngineParts:
    """Prepare `loaded.model` for an engine and allocate the pools.

    Raises `OptionError`, `MemoryBudgetError`, `DeviceError` for a model on several devices, `UnsupportedModelError` for
    a family whose attention cannot be batched.
    """
    device = _one_device(loaded.model)
    with on(device):
        return _build(loaded, options, device)


def _build(loaded: LoadedModel, options: EngineOptions, device: torch.device) -> EngineParts:
    model, text = loaded.model, loaded.config.get_text_config(decoder=True)
    context = options.context or loaded.context_length
    if context > loaded.context_length:
        raise OptionError(f"context {context} exceeds the model's {loaded.context_length} positions")
    undo_fuse: Callable[[], None] | None = None
    handle = enable(model, options.ring_len, options.state_dtype, mode="packed")
    before = model.config._attn_implementation
    # latents are spread over the heads after they were read, so they have to be gathered
    paged = options.paged and device.type == "cuda" and not getattr(text, "kv_lora_rank", None)
    model.set_attn_implementation(attention.register() if paged else "sdpa")

    def close() -> None:
        if undo_fuse is not None:
            undo_fuse()
        handle.disable()
        model.set_attn_implementation(before)

    try:
        layers, head = probe(model, text), _mtp_head(loaded, options)
        arrays = layers.arrays if head is None else [*layers.arrays, token_arrays(head)]
        specs = handle.specs
        ring = None if options.mode == "packed" else options.ring_len
        if options.spec is not None:
            ring = ring_of(options.spec_state, options.ring_len, options.window)
        state_dtype = str(handle.options.state_dtype).removeprefix("torch.")
        io_dtype = str(_io_dtype(model)).removeprefix("torch.")
        page_size = options.page_size or PAGE_SIZES.get(device.type, PAGE_SIZES["cpu"])
        if options.prefix_cache and options.prefix_interval % page_size:
            raise OptionError(
                f"prefix_interval {options.prefix_interval} is not a multiple of page_size {page_size}; the smallest "
                f"that works is {-(-options.prefix_interval // page_size) * page_size}"
            )
        twice = options.prefix_cache and options.prefix_policy == "truncate"
        slot = SlotPool.slot_bytes(specs, ring, state_dtype, io_dtype, twice)
        without_ring = SlotPool.slot_bytes(specs, None, state_dtype, io_dtype)
        # ranks that share a model must plan alike, for the poorest of them
        parameters = [*model.parameters(), *(head.parameters() if head is not None else ())]
        weights = most(model, sum(x.nbytes for x in {x.data_ptr(): x for x in parameters}.values()))
        requests = options.max_requests or MOST_REQUESTS.get(device.type, MOST_REQUESTS["cpu"])
        budget = least(model, _budget(options, device, weights))
        per_token = 32 if paged else most(model, _context_bytes(model, text, layers, context))
        width = options.window if options.spec else 1  # each token of a window has its context gathered
        most_gathered = min(GATHERED_TOKENS, requests * context * width, int(budget * GATHERED_SHARE / per_token))
        gathered, rows = max(context * width, most_gathered), requests * width
        work = most(model, _work_bytes(model, text, options, rows, context)) + gathered * per_token
        drafts = 0
        if options.spec is not None:
            drafts = Windows.row_bytes(options.spec_state, specs, options.window, state_dtype, io_dtype)
        if head is not None:
            drafts += hidden_bytes(head, options.window)
            work += hidden_bytes(head, options.window)  # of padding rows, which have no slot
        conv = _conv_bytes(specs, io_dtype) * (2 if twice and ring else 1)
        plan = plan_memory(
            budget, weights, work, slot + drafts, slot - without_ring - (conv - _conv_bytes(specs, io_dtype)), conv,
            PagePool.page_bytes(arrays, page_size), page_size, context, requests,
            options.max_requests, options.prefix_share if options.prefix_cache else 0.0, without_ring,
            _least_states(options), drafts,
        )  # fmt: skip
        graphs = options.graphs and device.type == "cuda"
        undo_fuse = fuse(model) if options.fuse and device.type == "cuda" else None
        slots = SlotPool(specs, plan.slots, ring, state_dtype, io_dtype, device, twice)
        windows = None
        if options.spec is not None:
            gates = [layer.gate_parameters() for layer in model.modules() if isinstance(layer, ReplayMixin)]
            windows = Windows(options.spec_state, slots, options.window, plan.slots, gates)
        states = None
        if plan.reserved_slots:
            states = SlotPool(specs, plan.reserved_slots, None, state_dtype, io_dtype, device)
        pages = PagePool(arrays, plan.pages, plan.page_size, device, clear=paged)
    except torch.OutOfMemoryError as error:
        close()
        raise OptionError(
            f"a step of {options.chunk_tokens} prompt tokens does not fit beside the weights; lower chunk_tokens"
        ) from error
    except BaseException:
        close()
        raise
    return EngineParts(
        plan, slots, states, pages, layers.linear, context, int(text.vocab_size), _stops(model, loaded.tokenizer),
        gathered, graphs, paged, windows, head, close,
    )  # fmt: skip


@torch.inference_mode()
def probe(model: Any, text: Any) -> Layers:
    """Let the model read two tokens and look at its cache."""
    if text.model_type.startswith("qwen4_exp"):
        raise UnsupportedModelError(
            f"the engine cannot run {text.model_type}: its indexer goes through rows one by one on the host; "
            "replayssm.enable and model.generate() work"
        )
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    linear, arrays = [], []
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        linear.append(isinstance(layer, LinearAttentionCacheLayerMixin))
        if not linear[-1]:
            kept = [layer.keys, layer.values]
            if (indexer := getattr(layer, "indexer_keys", None)) is not None:
                kept.append(indexer[:, None])
            arrays.append([TokenArray(x.shape[1], x.shape[3], x.dtype) for x in kept])
    return Layers(linear, arrays)


def _mtp_head(loaded: LoadedModel, options: EngineOptions) -> MTPHead | None:
    """The head that drafts, if it is asked for. Raises what `load_mtp` raises where there is none."""
    if options.spec != "mtp":
        return None
    if ranks_of(loaded.model) is not None:
        raise OptionError("spec 'mtp' needs the whole model on one device, and ranks share it; use 'ngram'")
    if loaded.path is None:
        raise OptionError("spec 'mtp' needs a checkpoint folder with tensors named mtp.*, and the model has none")
    head = load_mtp(loaded.path, loaded.model)
    head.config._attn_implementation = loaded.model.config._attn_implementation
    return head


def _least_states(options: EngineOptions) -> int:
    """States that a prefix cache is useless without: one that is kept, and beside it the buffers of one request."""
    if not options.prefix_cache:
        return 0
    return 1 if options.prefix_strategy == "no_buffer" else 2 * BUFFERS


def _one_device(model: Any) -> torch.device:
    found = {x.device for x in model.parameters()}
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found)))
        raise DeviceError(f"the model lies on {names}; the engine needs it on one device")
    device: torch.device = found.pop()
    return device


def _io_dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(m for m in model.modules() if hasattr(m, "conv1d")).conv1d.weight.dtype
    return dtype


def _conv_bytes(specs: Sequence[LayerSpec], io_dtype: str) -> int:
    return len(specs) * specs[0].conv_array(1, io_dtype).nbytes


def _budget(options: EngineOptions, device: torch.device, weights: int) -> int:
    if options.memory is not None:
        return options.memory
    if device.type != "cuda":
        return weights + CPU_BESIDES_WEIGHTS
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * options.memory_fraction) - max(0, others)


def _stops(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the generation config, else of the config or the tokenizer."""
    for found in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer):
        eos = getattr(found, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def _context_bytes(model: Any, text: Any, layers: Layers, context: int) -> int:
    """Bytes that a decode step needs for one token of one row's context, in the layer that needs most."""
    indices = 32
    if model.device.type != "cuda":
        kept = max((sum(one.nbytes for one in layer) for layer in layers.arrays), default=0)
        heads = text.num_attention_heads if getattr(text, "kv_lora_rank", None) else 0  # a latent is spread over heads
        width = getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0) + text.hidden_size
        return 3 * kept + heads * width * 8 + indices
    tokens = min(PROBE_TOKENS, context - 1)
    cache = _read_prompt(model, tokens)
    return int(1.2 * _peak(lambda: _read_one(model, cache)) / tokens) + indices


def _work_bytes(model: Any, text: Any, options: EngineOptions, rows: int, context: int) -> int:
    """Bytes that a step needs besides weights, pools and contexts: measured on a GPU, estimated on a CPU."""
    if model.device.type != "cuda":
        wide = 16 * text.hidden_size + 4 * getattr(text, "intermediate_size", text.hidden_size)
        return options.chunk_tokens * (4 * wide + context) + rows * text.vocab_size * 4 * 8
    length = min(options.chunk_tokens, context)
    prompt = _peak(lambda: _read_prompt(model, length, -(-options.chunk_tokens // length)))
    drawn = _peak(lambda: _draw(text.vocab_size, rows, model.device))
    return int(1.1 * max(prompt + length * context, drawn)) + rows * text.vocab_size * 8 + GIB // 2


@torch.inference_mode()
def _read_prompt(model: Any, length: int, rows: int = 1) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def _read_one(model: Any, cache: DynamicCache) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


@torch.inference_mode()
def _draw(vocabulary: int, rows: int, device: torch.device) -> None:
    """The sampler at its largest."""
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, repetition_penalty=1.1, logprobs=5)
    logits = torch.zeros(rows, vocabulary, device=device)
    seen = History(torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits, dtype=torch.int32))
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    sample(logits, prepare([params] * rows, [0] * rows, device), positions, seen)


def _peak(work: Callable[[], object]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return used
