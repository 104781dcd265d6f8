"""`replayssm study numerics` end to end on few steps, its results shown again, and what it refuses."""

import json

import pytest

from replayssm.study import accuracy, tables
from replayssm.study.setting import BASELINE, Setting, drift_settings

WORDS = "And it came to pass in those days, that there was no bread in the land.\n" * 60


def test_numerics(cli, tmp_path):
    """On few steps: everything is measured, written, and shown again from what was written."""
    (tmp_path / "words.txt").write_text(WORDS)
    text = ("--text", str(tmp_path / "words.txt"), "--models", "gdn")
    out = tmp_path / "numerics"
    result = cli("study", "numerics", "--steps", "70", "--tokens", "3", *text, "--out", str(out), "--json")
    assert result.code == 0
    found = result.json
    assert found.keys() == {"command", "quick", "device", "versions", "drift", "forgetting", "text", "claims"}
    assert found["command"].startswith("replayssm study numerics --models gdn --text")
    assert len(found["drift"]) == 2 * 2 * 2 * len(drift_settings())  # kinds, decays, marks
    assert all(0 < row["state_error"] < 0.1 for row in found["drift"])
    assert {row["tokens"] for row in found["text"]["gdn"]} == {24}
    assert {claim["holds"] for claim in found["claims"]} <= {True, False}

    assert json.loads((out / "numerics.json").read_text()) == found
    assert all((out / f"{name}.png").stat().st_size > 10_000 for name in ("drift", "ring", "rounding"))

    again = cli("study", "numerics", "--from", str(out / "numerics.json"))
    assert again.code == 0
    for table in tables.tables(found):
        assert table.title in again.out
        assert table.title in result.err  # where --json sends what is for people


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "-1"), "--steps -1"),
        (("--tokens", "0"), "--tokens 0"),
        (("--models", "nothing", "--text", __file__, "--steps", "8"), "nothing"),
        (("--text", "/nowhere/at-all.txt", "--steps", "8"), "at-all.txt"),
        (("--from", __file__), "holds no results"),
        (("--from", "/nowhere/at-all.json"), "at-all.json"),
        (("--out", __file__, "--steps", "8"), "is a file"),
        (("--device", "tpu", "--steps", "8"), "tpu"),
    ],
)
def test_refusals(cli, words, said):
    result = cli("study", "numerics", *words)
    assert result.code == 2
    assert said in result.err
    assert result.out == ""


def test_task(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "SETTINGS", [accuracy.SETTINGS[0], BASELINE, Setting("replay", "bfloat16")])
    words = ("--count", "1", "--sets", "large,usual", "--models", "gdn")
    result = cli("study", "task", *words, "--out", str(tmp_path / "task.json"), "--json")
    assert result.code == 0
    found = result.json
    assert found.keys() == {"command", "device", "versions", "task"}
    assert found["command"].startswith("replayssm study task --models gdn --count 1 --sets large,usual --out")
    assert json.loads((tmp_path / "task.json").read_text()) == found
    rows = found["task"]["gdn"]
    assert [row["route"] for row in rows] == ["stock", "packed", "replay"] * 2
    assert [row["set"] for row in rows] == ["large"] * 3 + ["usual"] * 3
    assert all(row["count"] == 1 and row["low"] <= row["accuracy"] <= row["high"] for row in rows)
    for table in tables.scores(found):
        assert table.title in result.err
    assert "1 sums of 3 to 10 numbers" in result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--count", "0"), "--count 0"),
        (("--sets", "usual,tiny"), "'tiny'"),
        (("--sets", ""), "sets of problems: usual, large"),
        (("--models", "nothing"), "nothing"),
        (("--out", "/nowhere/at/all.json"), "/nowhere/at/all.json"),
    ],
)
def test_task_refusals(cli, words, said):
    result = cli("study", "task", *words)
    assert result.code == 2
    assert said in result.err
