"""Load a local checkpoint folder, as the hub lays it out, with replay layers in it. Nothing is fetched."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from replayssm.errors import DtypeError, ModelFilesError, ModelNotFoundError
from replayssm.models.enable import patched_classes
from replayssm.models.families import family_of, layer_specs
from replayssm.shipped import SHIPPED
from replayssm.spec import LayerSpec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("float32", "bfloat16", "float16", "auto")
# Gate parameters stay in fp32 whatever the model's dtype: the decay is exp(-exp(A_log)·…), twice exponential in them.
KEEP_FP32 = ("A_log", "dt_bias")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its tokenizer, the folder it came from, and the geometry of its linear layers."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path
    config: PreTrainedConfig
    specs: tuple[LayerSpec, ...]

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        return int(self.config.get_text_config(decoder=True).max_position_embeddings)


def load_model(name_or_path: str | Path, *, dtype: str = "float32", device: str | None = None) -> LoadedModel:
    """Load a shipped model by name ("gdn") or any local safetensors folder.

    Args:
        name_or_path: name in `SHIPPED`, or a folder with config.json, weights (one file or sharded) and tokenizer.
        dtype: of the weights: float32, bfloat16, float16, or "auto" for what the config says. `A_log` and `dt_bias`
            stay float32.
        device: torch device; None takes a GPU when there is one, else the CPU.

    The linear layers are replay layers that decode as stock ones until `replayssm.enable(model)`.
    Raises `ModelNotFoundError` (folder, weights or tokenizer missing), `ModelFilesError` (files that cannot be used),
    `UnsupportedModelError`, `ShapeError`, `DtypeError`.
    """
    if dtype not in DTYPES:
        raise DtypeError.unsupported("model", dtype, DTYPES)
    path = find_model(name_or_path)
    config = load_config(path)
    text = config.get_text_config(decoder=True)
    specs = layer_specs(text)
    check_weights(path)
    tokenizer = _load_tokenizer(path)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = _load_weights(path, config, dtype).to(device).eval()  # type: ignore[arg-type]
    return LoadedModel(model, tokenizer, path, config, specs)


def find_model(name_or_path: str | Path) -> Path:
    """Folder of a shipped model or of a path. Raises `ModelNotFoundError` naming what exists."""
    try:
        path = SHIPPED.get(str(name_or_path)) or Path(name_or_path).expanduser()
        if str(name_or_path) and path.is_dir():
            return path
    except (OSError, RuntimeError):  # a name too long for the file system, an unknown ~user
        pass
    near = difflib.get_close_matches(str(name_or_path), SHIPPED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; shipped models: {', '.join(SHIPPED)}"
    raise ModelNotFoundError(f"model {str(name_or_path)!r} is neither a folder nor a shipped model{hint}")


def load_config(path: Path) -> PreTrainedConfig:
    """The folder's config, with a model type that replay knows."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} has no config.json; give a folder as the hub lays it out")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except OSError as error:
        raise ModelFilesError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise ModelFilesError(f"{file} is not a JSON object: {error}") from error
    family_of(model_type)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers validates configs with several exception types
        raise ModelFilesError(f"{file} is not a usable {model_type} config: {error}") from error


def check_weights(path: Path) -> None:
    """Every weight file that transformers will read is there, and as long as its own header says."""
    one = (path / WEIGHTS).is_file() or not (path / INDEX).is_file()
    names = [WEIGHTS] if one else sorted(set(weight_map(path / INDEX).values()))
    for name in names:
        file = path / name
        if not file.is_file():
            what = f"of {len(names)} shards" if len(names) > 1 else "and there is no index of shards"
            raise ModelNotFoundError(f"weights {file} are missing ({what}); copy the file into the folder")
        try:
            with file.open("rb"), safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except PermissionError as error:
            raise ModelFilesError(f"weights {file} cannot be read: {error.strerror}") from error
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size
            raise ModelFilesError(f"weights {file} ({size} bytes) are truncated or damaged: {error}") from error


def weight_map(index: Path) -> dict[str, str]:
    """Which file beside the index holds which tensor. Raises `ModelFilesError` for an index that does not say so."""
    try:
        files: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(f"{index} is not a weight index: {error!r}") from error
    if not files:
        raise ModelFilesError(f"{index} names no weight file")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFilesError(f"{index} names {name!r}, which is not the name of a file beside it")
    return files


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
    if not any((path / name).is_file() for name in files):
        raise ModelNotFoundError(
            f"{path} has no tokenizer (looked for {', '.join(files)}); copy tokenizer.json into it"
        )
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ModelFilesError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def _load_weights(path: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = AutoModelForImageTextToText
    cls = auto._model_mapping[type(config)]
    model_type = config.get_text_config(decoder=True).model_type
    with patched_classes(None, model_type), _kept_in_fp32(cls):
        try:
            model, info = auto.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below with both shapes
            )
        except Exception as error:  # transformers raises many types here
            raise ModelFilesError(f"the model in {path} cannot be built: {error!r}") from error
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} is {list(got)}, the config asks for {list(want)}" for name, got, want in info["mismatched_keys"]
    ]
    if problems:
        raise ModelFilesError(f"weights in {path} do not fit the config: {some_of(problems)}")
    return model


@contextmanager
def _kept_in_fp32(cls: Any) -> Iterator[None]:
    # transformers reads this class attribute while it plans the dtypes of a load.
    before = cls._keep_in_fp32_modules_strict
    cls._keep_in_fp32_modules_strict = [*(before or ()), *KEEP_FP32]
    try:
        yield
    finally:
        cls._keep_in_fp32_modules_strict = before


def some_of(names: list[str], most: int = 5) -> str:
    """The first few, and how many there are besides."""
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
