"""Tensor parallelism: one model on several processes (ranks) of torch.distributed, each with a share of its heads.

    torch.distributed.init_process_group("nccl")       # torchrun has set the rest
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    loaded = replayssm.load_model(path, dtype="bfloat16", device="cpu")
    llm = replayssm.LLM(parallelize(loaded, device="cuda"))

A linear-attention layer of a rank is a whole, smaller layer of H/ranks key heads and HV/ranks value heads: its
projections, conv channels, gates and state are those of its heads, and its outputs are added up over the ranks after
the output projection. Attention is cut by head in the same way (latents of MLA and indexers stay whole, key/value heads
are repeated where there are fewer than ranks), MLPs and experts by columns. What comes before and after, norms, router,
embedding, output head and a vision tower, is whole and computed on every rank.

Attention, MLPs and experts are cut where transformers' own plan (`base_model_tp_plan`) cuts them, and there are two
differences. That plan gathers the projections of linear-attention layers, so that each rank would keep the whole state;
and it makes every weight a DTensor, which neither the merged products of the engine nor our operations take.

All ranks must do the same forwards in the same order. Sums over ranks are the same on all of them, bit for bit, and so
is whatever is computed from them by the same operations on the same kind of device: the tokens as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from replayssm.errors import OptionError, UnsupportedModelError
from replayssm.models.families import FAMILIES
from replayssm.models.layers import ReplayMixin
from replayssm.models.loading import LoadedModel
from replayssm.models.parallel_cuts import Share, is_linear, plan_of, scale_sizes, zero_bias

Model = TypeVar("Model", nn.Module, LoadedModel)
_RANKS = "_replay_ranks"


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model: their group, how many they are, which one this is."""

    group: Any
    size: int
    rank: int

    @staticmethod
    def of(group: Any = None) -> Ranks:
        """Of an initialised group; None is the group of all processes."""
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError(
                "torch.distributed is not initialised; start the processes with torchrun and call "
                "torch.distributed.init_process_group('nccl') first ('gloo' on CPUs)"
            )
        if dist.get_rank(group) < 0:
            raise OptionError(f"rank {dist.get_rank()} is not in the group; only its members share the model")
        return Ranks(group, dist.get_world_size(group), dist.get_rank(group))

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its memory."""
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, pieces: int) -> Tensor:
        """All `pieces` [..., n] of something that is cut along its last dimension, of which each rank has one."""
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return torch.cat(found[:: self.size // pieces], -1)


def parallelize(model: Model, group: Any = None, device: str | torch.device | None = None) -> Model:
    """Cut a loaded model down to this rank's share, in place, and return it.

    Args:
        model: a transformers model of a family in `replayssm.models.families.FAMILIES`, or what `load_model` returns;
            the same weights on every rank, replay not enabled yet. Every rank loads all of it, best on the CPU.
        group: a process group; None takes all processes.
        device: where the share goes; None leaves it where the model is.

    It decodes afterwards as before, by `model.generate()`, `enable` or an `Engine`, where all ranks do the same. There
    is no way back, no backward, and `state_dict` is that of the share.

    Raises, with the model left as it was, `OptionError` (torch.distributed is not initialised, the model is parallel or
    enabled already), `ShapeError` (heads or widths that do not divide by the ranks), `UnsupportedModelError`.
    """
    ranks = Ranks.of(group)
    inner: Any = model.model if isinstance(model, LoadedModel) else model
    layers = [layer for layer in inner.modules() if is_linear(layer)]
    if not layers:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no linear-attention layer that replay knows; "
            f"supported model types: {', '.join(FAMILIES)}"
        )
    if (before := ranks_of(inner)) is not None:
        raise OptionError(f"the model is cut for {before.size} ranks already; load it again")
    if any(isinstance(layer, ReplayMixin) and layer.replay is not None for layer in layers):
        raise OptionError("replay is enabled for the whole model; disable it, and enable it after parallelize")
    if ranks.size > 1:
        _apply(inner, ranks)
    setattr(inner, _RANKS, ranks)
    if device is not None:
        inner.to(device)
    if isinstance(model, LoadedModel):
        return replace(model, specs=tuple(_local(spec, ranks.size) for spec in model.specs))
    return model


def ranks_of(model: nn.Module) -> Ranks | None:
    """Who shares the model, None when it is nobody's share."""
    ranks: Ranks | None = getattr(model, _RANKS, None)
    return ranks


def least(model: nn.Module, value: int) -> int:
    """The smallest `value` of all ranks of a model, so that they plan alike."""
    ranks = ranks_of(model)
    return value if ranks is None else _reduced(model, ranks, value, dist.ReduceOp.MIN)


def most(model: nn.Module, value: int) -> int:
    """The largest `value` of all ranks of a model."""
    ranks = ranks_of(model)
    return value if ranks is None else _reduced(model, ranks, value, dist.ReduceOp.MAX)


def random_bits(model: nn.Module) -> Callable[[int], int]:
    """`random.getrandbits`, or one that gives all ranks of a model the same numbers in the same order."""
    if ranks_of(model) is None:
        return random.getrandbits
    return random.Random(least(model, random.getrandbits(63))).getrandbits


def _reduced(model: nn.Module, ranks: Ranks, value: int, op: Any) -> int:
    shared = torch.tensor(value, dtype=torch.int64, device=next(model.parameters()).device)
    dist.all_reduce(shared, op, group=ranks.group)
    return int(shared)


def _apply(model: nn.Module, ranks: Ranks) -> None:
    plan = plan_of(model, ranks.size, ranks.rank)
    model.requires_grad_(False)
    for cut in plan.cuts:
        cut.apply()
    for module in plan.sized:
        scale_sizes(module, ranks.size)
    for layer, heads in plan.groups:
        layer.num_key_value_groups = heads
    for projection in plan.biases if ranks.rank else ():
        zero_bias(projection)
    for norm, share in plan.wide:
        _widen(norm, share, ranks)
    for module in plan.summed:
        module.register_forward_hook(lambda module, inputs, output: ranks.add(output))


def _widen(norm: nn.Module, share: Share, ranks: Ranks) -> None:
    """A norm over all heads sees those of all ranks, and hands on those of this one."""
    norm.register_forward_pre_hook(lambda module, inputs: (ranks.gather(inputs[0], share.pieces), *inputs[1:]))
    norm.register_forward_hook(lambda module, inputs, output: output.chunk(share.pieces, -1)[share.which].contiguous())


def _local(spec: Any, size: int) -> Any:
    return replace(spec, num_k_heads=spec.num_k_heads // size, num_v_heads=spec.num_v_heads // size)
