"""docs/benchmarks: the tables are those of the raw results beside them, and the results keep the project's rules."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from replayssm.bench.timing import MAX_COPIES
from replayssm.kernels.policy import decode_route
from replayssm.spec import DTYPE_BYTES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
FILES = sorted(FOLDER.glob("*.json"))


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_results_for_both_kinds():
    assert {"decode-gdn.json", "decode-kda.json"} <= {path.name for path in FILES}


def test_the_readme_shows_the_raw_results():
    spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "scripts" / "benchmark_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = [FOLDER / name / "README.md" for name in ("", "serving", "prefix")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for title, table in module.tables().items():
        assert table in text, f"table {title!r} is not that of the JSON; run scripts/benchmark_tables.py"


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("batch", [8, 64, 256])
def test_the_first_page_shows_the_raw_results(kind, batch):
    rows = [
        r for r in load(FOLDER / f"decode-{kind}.json")["rows"] if (r["batch"], r["state_dtype"]) == (batch, "float32")
    ]
    best = min(r["us"] for r in rows if r["route"] == "packed")
    (replay,) = (r["us"] for r in rows if r["route"] == "replay" and not r["peer"])
    cells = f", {batch} | {best:.1f} | {replay:.1f} | {best / replay:.2f} × |"
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith(f"| {kind.upper()} ") and line.endswith(cells) for line in lines) == 1, cells


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_can_be_reproduced_and_was_checked(path):
    result = load(path)
    assert result["ok"]
    assert result["device"]["name"]
    assert {"torch", "triton", "python"} <= set(result["versions"])
    assert result["command"].startswith("replayssm bench decode ")
    assert not re.search(r"(^|[\s=])[/~]", result["command"]), "a path of one machine"
    for row in result["rows"]:
        assert row["status"] == "ok", row
        assert row["check"]["output"] <= row["check"]["output_limit"]
        assert row["check"]["state"] <= row["check"]["state_limit"]
        assert row["graph"]
        assert row["working_set"] > 3 * result["device"]["l2_bytes"] or row["copies"] == MAX_COPIES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mode_auto_is_never_slower_than_packed(path):
    """The policy's table against what was measured: at most 1 % behind, at any batch."""
    result = load(path)
    layer, ring_len = result["layer"], result["ring_len"]
    rows = [row for row in result["rows"] if row["kernel"] == "replay" and not row["peer"]]
    assert rows
    for row in rows:
        heads, size = row["batch"] * layer["num_v_heads"], DTYPE_BYTES[row["state_dtype"]]
        route = decode_route("cuda", layer["kind"] == "kda", size, heads, ring_len)
        assert route == "packed" or row["vs_packed"] >= 0.99, (row["batch"], row["state_dtype"])
        assert route == row["auto_route"], "the policy has changed; measure again"


@pytest.mark.parametrize("path", sorted((FOLDER / "serving").glob("*.json")), ids=lambda path: path.stem)
def test_a_serving_result_can_be_reproduced_and_was_checked(path):
    result = load(path)
    assert result["ok"]
    assert result["weights"] == "random weights"
    assert result["command"].startswith("replayssm bench throughput ")
    assert not re.search(r"(^|[\s=])[/~]", result["command"]), "a path of one machine"
    assert {"torch", "triton", "python", "transformers"} <= set(result["versions"])
    for row in result["rows"]:
        assert (row["status"], row["check"]["ok"]) == ("ok", True), row
        assert row["steps"] == row["periods"] * result["ring_len"]
        assert row["mode"] != "auto" or row["vs_packed"] >= 0.99, "mode auto must not be slower than packed decode"


@pytest.mark.parametrize("path", sorted((FOLDER / "prefix").glob("*.json")), ids=lambda path: path.stem)
def test_a_prefix_result_can_be_reproduced_and_was_checked(path):
    result = load(path)
    assert result["ok"]
    assert result["command"].startswith("replayssm bench prefix ")
    assert not re.search(r"(^|[\s=])[/~]", result["command"]), "a path of one machine"
    assert {"torch", "python", "transformers"} <= set(result["versions"])
    for row in result["rows"]:
        assert (row["status"], row["check"]["cold"]["ok"], row["check"]["warm"]["ok"]) == ("ok", True, True), row
        assert row["met"] is not False, row
    for row in result["tree"]:
        assert (row["status"], row["met"]) == ("ok", True), row
    assert result["reuse"]
    assert all(one["equal"] for one in result["reuse"])


def test_the_first_page_shows_what_the_engine_gains():
    rows = load(FOLDER / "serving" / "throughput-qwen-4b-fp32.json")["rows"]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    gain = {row["batch"]: row["vs_packed"] for row in rows if row["mode"] == "auto"}
    said = f"{gain[8]:.2f} × as many tokens a second as packed decode at batch 8, {gain[64]:.2f} × at 64, "
    assert said + f"{gain[128]:.2f} × at 128 and {gain[256]:.2f} × at 256" in text
