"""Checked input of `serve`: the command line over a YAML file over defaults, refused before torch is imported."""

from __future__ import annotations

import argparse
import importlib.util
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from replayssm.cli.options import named_as_options
from replayssm.cli.serve_options import OPTIONS
from replayssm.cli.speculation import spec_fields
from replayssm.dtypes import parse_state_dtype
from replayssm.engine.options import EngineOptions
from replayssm.errors import OptionError
from replayssm.planner.request import parse_size
from replayssm.server.options import ServerOptions

DEFAULT_MODEL = "gdn"
KEY_VARIABLE = "REPLAYSSM_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "xgrammar")
SERVER = ("served_name", "host", "port", "api_key", "max_queue", "drain_seconds")
ENGINE = (
    "mode", "memory_fraction", "max_requests", "context", "page_size", "preempt", "prefix_cache",
    "prefix_policy", "prefix_strategy",
    "prefix_interval", "prefix_share", "chunk_tokens", "graphs", "overlap",
)  # fmt: skip
STRATEGIES = ("no_buffer", "extra_buffer")
ALIASES = {
    "linear_replayssm_cache_len": "ring_len",
    "mamba_ssm_dtype": "state_dtype",
    "mem_fraction_static": "memory_fraction",
}


class ServeRequest(NamedTuple):
    """Checked input of `serve`. `given` are the options that someone named, by their own names here."""

    args: argparse.Namespace
    model: str
    dtype: str
    device: str | None
    server: ServerOptions
    engine: EngineOptions
    given: dict[str, Any]
    decode_backend: str | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ServeRequest:
        """Raises `OptionError`, `RingLengthError` or `DtypeError`."""
        for package in PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise OptionError(f"serve needs {package}, which is not installed: pip install 'replayssm[serve]'")
        given = _given(args)
        backend = given.pop("linear_attn_decode_backend", None)
        _check_backend(backend)
        _resolve_aliases(given)
        server = {name: given[name] for name in SERVER if name in given}
        if "max_body" in given:
            server["max_body"] = parse_size("--max-body", given["max_body"])
        if "chat_template" in given:
            server["chat_template"] = Path(given["chat_template"])
        if (key := os.environ.get(KEY_VARIABLE)) and "api_key" not in given:
            server["api_key"] = key
        engine = {name: given[name] for name in ENGINE if name in given}
        engine |= spec_fields(given, given.get("ring_len"))
        if "memory" in given:
            engine["memory"] = parse_size("--memory", given["memory"])
        if "state_dtype" in given:
            engine["state_dtype"] = parse_state_dtype(given["state_dtype"], "--state-dtype")
        _check_together(given)
        with named_as_options():
            made = ServerOptions(**server), EngineOptions(**engine)
        model = str(given.get("model", DEFAULT_MODEL))
        return cls(args, model, given.get("dtype", "float32"), given.get("device"), *made, given, backend)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line names, else the file."""
    found = {} if args.config is None else _read_file(Path(args.config))
    words = {name: getattr(args, name) for name in ("model", *OPTIONS)}
    return found | {name: value for name, value in words.items() if value is not None}


def _read_file(file: Path) -> dict[str, Any]:
    """Options of a YAML file, checked as those of the command line."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {file} has no options; write lines like 'port: 9000'")
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name != "model" and name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=1)
            hint = f"; did you mean {OPTIONS[near[0]].name!r}?" if near else "; see `replayssm serve --help`"
            raise OptionError(f"--config {file}: {key!r} is no option{hint}")
        if name in found:
            raise OptionError(f"--config {file} names {key!r} twice")
        if value is not None:
            found[name] = _converted(file, str(key), value, OPTIONS.get(name))
    return found


def _converted(file: Path, key: str, value: Any, option: Any) -> Any:
    kind = str if option is None else option.kind
    wrong = OptionError(f"--config {file}: {key} {value!r} is no {_noun(kind)}")
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(value, (bool, list, dict)):
        raise wrong
    try:
        value = kind(str(value))
    except ValueError:
        raise wrong from None
    if option is not None and option.choices is not None and value not in option.choices:
        raise OptionError(f"--config {file}: {key} {value!r} is unknown; use one of {', '.join(option.choices)}")
    return value


def _noun(kind: Any) -> str:
    return {bool: "true or false", int: "whole number", float: "number"}.get(kind, "text")


def _resolve_aliases(given: dict[str, Any]) -> None:
    """Other engines' names become ours; both at once must agree."""

    def put(alias: str, value: Any, name: str, mine: Any) -> None:
        if given.get(name, mine) != mine:
            raise OptionError(
                f"--{alias.replace('_', '-')} {value} contradicts --{name.replace('_', '-')} {given[name]}; drop one"
            )
        given[name] = mine

    for alias, name in ALIASES.items():
        if alias in given:
            value = given.pop(alias)
            if name == "state_dtype":
                value = parse_state_dtype(value, "--mamba-ssm-dtype")
                if name in given:
                    given[name] = parse_state_dtype(given[name], "--state-dtype")
            put(alias, value, name, value)
    if "enable_linear_replayssm" in given:
        on = given.pop("enable_linear_replayssm")
        put("enable_linear_replayssm" if on else "no-enable-linear-replayssm", "", "mode", "replay" if on else "packed")
    strategy = given.pop("mamba_scheduler_strategy", None)
    if strategy not in (None, *STRATEGIES):
        raise OptionError(
            f"--mamba-scheduler-strategy {strategy!r} has no counterpart; use one of {', '.join(STRATEGIES)}"
        )
    if strategy == "extra_buffer" or (strategy is not None and given.get("prefix_cache")):
        put("mamba_scheduler_strategy", strategy, "prefix_strategy", strategy)


def _check_backend(backend: str | None) -> None:
    if backend not in (None, "triton"):
        raise OptionError(
            f"--linear-attn-decode-backend {backend!r} has no counterpart: kernels are chosen by the device, see "
            "`replayssm env`; drop the option or say triton"
        )


def _check_together(given: dict[str, Any]) -> None:
    if "memory" in given and "memory_fraction" in given:
        raise OptionError("--memory and --memory-fraction both say how much memory to take; drop one")
    for name in ("prefix_interval", "prefix_policy", "prefix_strategy", "prefix_share"):
        if name in given and not given.get("prefix_cache"):
            raise OptionError(f"--{name.replace('_', '-')} {given[name]} has no effect without --prefix-cache")
    if given.get("mode") == "packed" and "ring_len" in given:
        raise OptionError(f"--ring-len {given['ring_len']} has no effect in mode packed; drop one")
