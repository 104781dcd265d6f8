"""Which part of each parameter a rank holds, by the names that transformers gives to them.

Every parameter of a linear-attention layer, an attention layer or an MLP has a style, and one without is an error, so
that nothing stays whole, or is cut, by accident:

    heads    rows of the output, heads one after another: each rank takes the next ones
    qkv      the same for q | k | v beside each other, each cut for itself
    kv       rows of keys and values; where there are fewer heads than ranks, neighbours hold the same head
    columns  columns of the input, of a projection whose outputs the ranks add up; its bias is added by the first rank
    packed   experts [E, gate | up, D], each cut for itself
    experts  experts [E, D, I]
    whole    every rank holds all of it
    wide     a norm over the heads of all ranks: whole, its input is gathered and its output cut
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from replayssm.errors import ShapeError, UnsupportedModelError
from replayssm.models.layers import ADAPTERS, ReplayMixin

Style = Literal["heads", "qkv", "kv", "columns", "packed", "experts", "whole", "wide"]

LINEAR: dict[str, Style] = {
    **dict.fromkeys(("in_proj_qkv", "conv1d"), "qkv"),
    # qwen3_next keeps q|k|v|z and b|a of a key head together
    **dict.fromkeys(("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_a", "in_proj_b"), "heads"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), "heads"),
    **dict.fromkeys(("g_b_proj", "f_b_proj", "f_proj", "A_log", "dt_bias"), "heads"),
    **dict.fromkeys(("out_proj", "o_proj"), "columns"),
    **dict.fromkeys(("norm", "o_norm", "f_a_proj", "g_a_proj"), "whole"),
}
ATTENTION: dict[str, Style] = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "g_proj"), "heads"),
    **dict.fromkeys(("k_proj", "v_proj"), "kv"),
    "o_proj": "columns",
    **dict.fromkeys(("q_norm", "k_norm", "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), "whole"),
}
MLP: dict[str, Style] = {
    **dict.fromkeys(("gate_proj", "up_proj"), "heads"),
    "down_proj": "columns",
    "experts.gate_up_proj": "packed",
    "experts.down_proj": "experts",
    **dict.fromkeys(("gate", "shared_expert_gate"), "whole"),
}
DIM: dict[Style, int] = {"heads": 0, "qkv": 0, "kv": 0, "columns": 1, "packed": 1, "experts": 2}
KV_HEADS = "key/value heads"
# Sizes that modules keep beside their parameters, and that say afterwards what a rank has.
SIZES = (
    "num_k_heads", "num_v_heads", "num_heads", "key_dim", "value_dim", "qkv_dim", "conv_dim",
    "intermediate_size", "intermediate_dim",
)  # fmt: skip


class Share(NamedTuple):
    """What a rank gets of something that is cut into `pieces`: number `which`."""

    pieces: int
    which: int


@dataclass(frozen=True)
class Cut:
    """A parameter of `owner`: of each of the `parts` along `dim` a rank takes its share."""

    owner: nn.Module
    name: str
    style: Style
    dim: int
    parts: tuple[int, ...]
    share: Share

    def apply(self) -> None:
        """Replace the parameter by this rank's part of it."""
        pieces, which = self.share
        whole = getattr(self.owner, self.name).data
        mine = torch.cat([part.chunk(pieces, self.dim)[which] for part in whole.split(self.parts, self.dim)], self.dim)
        setattr(self.owner, self.name, nn.Parameter(mine.contiguous().clone(), requires_grad=False))
        if self.name != "weight":
            return
        if isinstance(self.owner, nn.Linear):
            self.owner.out_features, self.owner.in_features = mine.shape
        elif isinstance(self.owner, nn.Conv1d):  # depthwise
            self.owner.in_channels = self.owner.out_channels = self.owner.groups = mine.shape[0]


@dataclass
class Plan:
    """All that changes in a model: see `plan_of`. `needs` are the sizes that have to divide, and what they are of."""

    cuts: list[Cut]
    needs: set[tuple[int, str]]
    summed: list[nn.Module]  # their outputs are added up over the ranks
    biases: list[nn.Module]  # projections whose bias one rank adds
    wide: list[tuple[nn.Module, Share]]  # norms over the heads of all ranks
    groups: list[tuple[Any, int]]  # attention layers, and their query heads per key/value head
    sized: list[nn.Module]  # modules with `SIZES`


def plan_of(model: nn.Module, size: int, rank: int) -> Plan:
    """How rank `rank` of `size` changes a transformers model of our families; nothing is changed yet.

    Raises `UnsupportedModelError` for a parameter that is not known, or not a plain one (a quantized model), and
    `ShapeError` with both numbers where heads or widths do not divide.
    """
    plan = Plan([], set(), [], [], [], [], [])
    for layer in decoder_layers(model):
        for name, block in layer.named_children():
            if is_linear(block):
                _plan_linear(plan, block, Share(size, rank))
            elif name == "self_attn":
                _plan_attention(plan, block, Share(size, rank))
            elif name == "mlp":
                _plan_mlp(plan, block, Share(size, rank))
    _check_sizes(plan.needs, size)
    return plan


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of the list that has linear-attention layers in it; a vision tower is not among them."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and any(is_linear(x) for layer in stack for x in layer.children()):
            yield from stack


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear-attention layer, stock or ours."""
    return isinstance(module, ReplayMixin) or type(module).__name__ in ADAPTERS


def _plan_linear(plan: Plan, layer: Any, share: Share) -> None:
    if hasattr(layer, "num_k_heads"):
        heads, parts = layer.num_k_heads, (layer.key_dim, layer.key_dim, layer.value_dim)
    else:
        heads, parts = layer.num_heads, (layer.qkv_dim,) * 3
    plan.needs.add((heads, "linear-attention key heads"))
    for cut in _cuts(plan, layer, LINEAR, share, share, parts):
        plan.cuts.append(cut)
    plan.summed.append(layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj)
    plan.sized += [layer, *(x for x in [getattr(layer, "forget_gate", None)] if x is not None)]


def _plan_attention(plan: Plan, layer: Any, share: Share) -> None:
    heads, kv_share = layer.config.num_attention_heads, share
    plan.needs.add((heads, "attention heads"))
    if hasattr(layer, "k_proj"):
        kv_heads, (size, rank) = layer.config.num_key_value_heads, share
        plan.needs.add((kv_heads, KV_HEADS))
        if kv_heads < size:  # each is held by size / kv_heads ranks, whose query heads are all of its group
            kv_share = Share(kv_heads, rank * kv_heads // size)
        plan.groups.append((layer, heads // size * kv_share.pieces // kv_heads))
    for cut in _cuts(plan, layer, ATTENTION, share, kv_share):
        if cut.style == "wide":
            plan.wide.append((cut.owner, cut.share))
        else:
            plan.cuts.append(cut)
    plan.summed.append(layer.o_proj)
    plan.sized.append(layer)


def _plan_mlp(plan: Plan, block: Any, share: Share) -> None:
    for cut in _cuts(plan, block, MLP, share, share):
        plan.cuts.append(cut)
        what = "columns of experts" if cut.style in ("packed", "experts") else "columns of an MLP"
        plan.needs.add((cut.parts[0], what))
    # one sum for a whole block: routing weights and the shared expert's gate are the same on all ranks
    plan.summed.append(block)
    plan.sized += [x for x in block.modules() if hasattr(x, "gate_proj") or hasattr(x, "gate_up_proj")]


def _cuts(
    plan: Plan, block: Any, styles: Mapping[str, Style], share: Share, kv_share: Share, qkv: tuple[int, ...] = ()
) -> Iterator[Cut]:
    for path, parameter in block.named_parameters():
        names = path.removesuffix(".weight").removesuffix(".bias").split(".")
        owner_path, _, name = path.rpartition(".")
        owner, key = block.get_submodule(owner_path), names[-1]
        style = styles.get(".".join(names[-2:]), styles.get(key))
        if names[0] == "indexer":
            style = "whole"  # it decides for all heads together
        if style is None:
            raise UnsupportedModelError(
                f"{type(block).__name__} has a parameter {path!r} {list(parameter.shape)} that tensor parallelism does "
                "not know; run the model on one rank"
            )
        if isinstance(owner, nn.Linear) and type(owner) is not nn.Linear:
            raise UnsupportedModelError(
                f"{path!r} of {type(block).__name__} belongs to a {type(owner).__name__}; tensor parallelism needs "
                "plain weights"
            )
        if names in (["q_norm"], ["k_norm"]) and parameter.numel() > block.head_dim:
            yield Cut(owner, name, "wide", 0, (), share if key == "q_norm" else kv_share)
        elif style == "columns" and name == "bias":
            plan.biases.append(owner)
        elif style != "whole":
            dim = parameter.shape.index(max(parameter.shape)) if name == "A_log" else DIM[style]
            width = parameter.shape[dim]
            parts = qkv if style == "qkv" else (width // 2,) * 2 if style == "packed" else (width,)
            yield Cut(owner, name, style, dim, parts, kv_share if style == "kv" else share)


def _check_sizes(needs: set[tuple[int, str]], size: int) -> None:
    if wrong := sorted(need for need in needs if not _divides(size, *need)):
        most = min(number for number, what in needs if what != KV_HEADS)
        fits = [str(n) for n in range(1, most + 1) if all(_divides(n, *need) for need in needs)]
        what = ", ".join(f"{number} {name}" for number, name in wrong)
        raise ShapeError(
            f"{what} cannot be shared evenly by {size} ranks; this model runs on {', '.join(fits)} "
            f"rank{'s' if len(fits) > 1 else ''}"
        )


def _divides(size: int, number: int, what: str) -> bool:
    return number % size == 0 or (what == KV_HEADS and size % number == 0)


def zero_bias(projection: Any) -> None:
    """Leave the bias to another rank."""
    bias: Tensor = projection.bias
    projection.bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)


def scale_sizes(module: nn.Module, size: int) -> None:
    """Divide what `module` says of its own size."""
    for name in SIZES:
        if isinstance(value := module.__dict__.get(name), int):
            setattr(module, name, value // size)
