"""docs/serving.md says what is there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from replayssm.cli.parser import build_parser
from replayssm.cli.serve_options import GROUPS, OPTIONS
from tests.server.common import serving, shipped

DOC = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def part(title: str) -> str:
    return DOC.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_metric_and_no_other():
    with serving(shipped(), {"prefix_cache": True, "page_size": 16}) as running:
        text = running.call("/metrics").text
    there = {name.removeprefix("replayssm_") for name in re.findall(r"^# TYPE (\S+)", text, re.M)}
    rows = "".join(line.split("|")[1] for line in part("Metrics").splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == there


def test_options_and_paths_exist():
    others = {"config", "help", "seconds", "rounds"}  # the last two are those of the scripts of load and overhead
    for command in (["plan"], ["bench", "serve"]):
        with contextlib.redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit):
            build_parser().parse_args([*command, "--help"])
        others |= set(re.findall(r"--([a-z][a-z-]+)", text.getvalue()))
    named = set(re.findall(r"--([a-z][a-z-]+)", DOC))
    others |= {f"no-{option.name}" for option in OPTIONS.values() if option.kind is bool}
    assert named <= {option.name for option in OPTIONS.values()} | others
    for option in GROUPS["names of other engines"]:
        assert f"`--{option.name}`" in part("Options")
    for option in GROUPS["speculation"]:
        assert re.search(rf"^\| `--(no-)?{option.name}\b", part("Options"), re.M)
    with serving() as running:
        described = running.call("/openapi.json").json["paths"]
    paths = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health", "/metrics")
    for path in paths:
        assert path in described
        assert f"`{path}`" in part("Endpoints")
