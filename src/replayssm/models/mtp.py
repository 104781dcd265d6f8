"""The multi-token-prediction head of Qwen3.5 checkpoints: one more layer that guesses the token after the next one.

Checkpoints hold it under the names `mtp.*`, which transformers skips. At position t the head reads the hidden state
that the model's output head reads, that is after the model's last norm, and the embedding of token t+1; from both it
makes a hidden state for position t+1, from which the model's own output head tells token t+2:

    x = fc(concat(pre_fc_norm_embedding(embedding of token t+1), pre_fc_norm_hidden(hidden state of t)))
    hidden state of t+1 ≈ norm(layer(x)), with full attention over the pairs so far and rotary position t

To guess further ahead, the head reads its own output in place of the model's hidden state. Embedding and output head
are the model's. The head has a key/value cache of its own, one entry for each pair it has read.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from replayssm.errors import ModelFilesError, ModelNotFoundError, ShapeError, UnsupportedModelError
from replayssm.models.loading import INDEX, WEIGHTS, load_config, some_of, weight_map

PREFIX = "mtp."
MTP_WEIGHTS = "mtp.safetensors"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")  # a text config is of the latter type in both


class MTPHead(nn.Module):
    """The head of `model`, with random weights until they are loaded. Parameters are named as after `mtp.`.

    The embedding, the rotary positions and the output head stay the model's and are no part of this module's state.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        text = model.config.get_text_config(decoder=True)
        if text.model_type not in MODEL_TYPES:
            raise UnsupportedModelError(
                f"model type {text.model_type!r} has no MTP head known here; supported: {', '.join(MODEL_TYPES)}"
            )
        for key, value in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
            if (asked := getattr(text, key, value)) != value:
                raise UnsupportedModelError(f"the config has {key} = {asked!r}; supported: {value!r}")
        self.config = copy.deepcopy(text)
        self.config.num_hidden_layers, self.config.layer_types = 1, ["full_attention"]
        size, eps = text.hidden_size, text.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(size, eps)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(self.config, 0)])
        self.norm = qwen.Qwen3_5RMSNorm(size, eps)
        # In a tuple, so that they are not registered as parts of the head.
        self._shared = (model.get_input_embeddings(), model.get_output_embeddings(), model.get_decoder().rotary_emb)

    def new_cache(self) -> Cache:
        """An empty cache for `forward` and `draft`."""
        return DynamicCache(config=self.config)

    def forward(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        cache: Cache | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D] for the positions after those of `hidden`; `logits` reads them.

        Args:
            hidden: the model's last hidden states [B, T, D], after its final norm, or an output of this method.
            next_ids: the token after each of them [B, T].
            cache: pairs read before; the T new ones are added.
            position_ids: of `hidden` in the text [B, T]. None: as many as the cache holds, and the following.
            attention_mask: ones for real pairs [B, pairs in the cache + T], where rows are padded. None: all are real.
        """
        embedding, _, rotary = self._shared
        if next_ids.shape != hidden.shape[:-1] or hidden.shape[-1] != self.config.hidden_size:
            raise ShapeError.mismatch(
                "hidden", list(hidden.shape), [*next_ids.shape, self.config.hidden_size], "one token to a hidden state"
            )
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        x = torch.cat([self.pre_fc_norm_embedding(embedding(next_ids)), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(x)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=cache
        )
        x = self.layers[0](
            x,
            position_embeddings=rotary(x, position_ids),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
        )
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the token after next [B, T, vocabulary], by the model's output head."""
        return self._shared[1](hidden)

    @torch.no_grad()
    def draft(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        steps: int,
        cache: Cache | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The likeliest `steps` tokens [B, steps] after the last of `next_ids`. Other arguments as in `forward`.

        The cache holds the pairs that were given afterwards, not those that the head made up.
        """
        cache = self.new_cache() if cache is None else cache
        if position_ids is None:
            past = cache.get_seq_length()
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        drafted: list[Tensor] = []
        for _ in range(steps):
            out = self(hidden, next_ids, cache, position_ids=position_ids, attention_mask=attention_mask)
            hidden, position_ids = out[:, -1:], position_ids[:, -1:] + 1
            next_ids = self.logits(hidden).argmax(-1)
            drafted.append(next_ids)
            if attention_mask is not None:
                attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], dim=1)
        if steps > 1:
            cache.crop(1 - steps)
        return torch.cat(drafted, dim=1)


def has_mtp(folder: str | Path) -> bool:
    """Whether a checkpoint folder has weights named `mtp.*`."""
    return bool(_where(Path(folder)))


def check_mtp(folder: str | Path, name: str) -> None:
    """Whether the head of a model called `name` can be loaded from its folder, by config and names of tensors alone.

    Raises `UnsupportedModelError` or `ModelFilesError` with what works instead, and what `load_config` raises.
    """
    model_type = load_config(Path(folder)).get_text_config(decoder=True).model_type
    works = f"mtp works with {MODEL_TYPES[0]} checkpoints that have it, as the shipped gdn; ngram works with all"
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(f"{name}: model type {model_type!r} has no MTP head known here; {works}")
    if not has_mtp(folder):
        where = f"{WEIGHTS}, its shards or {MTP_WEIGHTS}"
        raise ModelFilesError(f"{name} has no tensors named {PREFIX}* in {where}; {works}")


def load_mtp(folder: str | Path, model: Any) -> MTPHead:
    """The MTP head stored in a checkpoint folder, for `model`, which was loaded from the same folder.

    Its tensors may lie among the model's weights, in one file or in shards, or in `mtp.safetensors` beside them. The
    head gets the dtype and the device of the model's output head, and is in eval mode.

    Raises `UnsupportedModelError` for a model type without a known head, `ModelFilesError` when tensors are missing,
    unknown or of another shape than the config asks for, or when a file is damaged, `ModelNotFoundError` for a missing
    file.
    """
    folder, model = Path(folder), model if isinstance(model, nn.Module) else getattr(model, "model", model)
    head = MTPHead(model)
    where = _where(folder)
    if not where:
        raise ModelFilesError(
            f"{folder} has no tensors named {PREFIX}* in {WEIGHTS}, its shards or {MTP_WEIGHTS}; "
            "not every checkpoint is stored with its MTP head"
        )
    tensors = {name.removeprefix(PREFIX): _read(file, name) for name, file in where.items()}
    wanted = head.state_dict()
    problems = [f"{PREFIX}{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{PREFIX}{name} is not known" for name in tensors if name not in wanted]
    problems += [
        f"{PREFIX}{name} is {list(tensors[name].shape)}, the config asks for {list(value.shape)}"
        for name, value in wanted.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if problems:
        raise ModelFilesError(f"the MTP head in {folder} does not fit the config: {some_of(problems)}")
    head.load_state_dict(tensors)
    weight = model.get_output_embeddings().weight
    return head.to(device=weight.device, dtype=weight.dtype).eval()


def _where(folder: Path) -> dict[str, Path]:
    # Name of each of the head's tensors -> its file. The separate file wins.
    found: dict[str, Path] = {}
    if (folder / WEIGHTS).is_file():
        found = _names(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        shards = weight_map(folder / INDEX)
        found = {name: folder / file for name, file in shards.items() if name.startswith(PREFIX)}
    if (folder / MTP_WEIGHTS).is_file():
        found = _names(folder / MTP_WEIGHTS)
    return found


def _names(file: Path) -> dict[str, Path]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: file for name in tensors.keys() if name.startswith(PREFIX)}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _read(file: Path, name: str) -> Tensor:
    if not file.is_file():
        raise ModelNotFoundError(f"weights {file} are missing, and {name} is in them; copy the file into the folder")
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ModelFilesError:
    size = file.stat().st_size if file.exists() else 0
    return ModelFilesError(f"weights {file} ({size} bytes) are truncated or damaged: {error}")
