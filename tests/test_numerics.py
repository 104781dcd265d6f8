"""docs/numerics.md shows the tables of the results beside it, and these are what the studies now make of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from replayssm.shipped import SHIPPED
from replayssm.spec import STATE_DTYPES
from replayssm.study import accuracy, claims, tables, text
from replayssm.study.setting import BASELINE, RING_LENGTHS, ROUNDED, drift_settings
from replayssm.study.task import SETS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "numerics.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def result():
    return json.loads((DOCS / "numerics" / "numerics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scores():
    return json.loads((DOCS / "numerics" / "task.json").read_text(encoding="utf-8"))


def names_a_path_of_one_machine(command):
    return re.search(r"(^|[\s=])[/~]", command)


def test_the_page_shows_every_table(result, scores):
    for table in [*tables.tables(result), *tables.scores(scores)]:
        assert table.markdown() in PAGE, f"table {table.title!r} is not that of the JSON"
        assert table.title in PAGE


def test_the_plots_are_there_and_shown():
    for name in ("drift", "ring", "rounding"):
        assert f"](numerics/{name}.png)" in PAGE
        assert (DOCS / "numerics" / f"{name}.png").is_file()


def test_verdicts_follow_from_the_numbers(result):
    assert claims.judge(result) == result["claims"]
    assert len(result["claims"]) == len(claims.CLAIMS)


def test_the_study_was_a_full_one(result):
    assert result["command"] in PAGE
    assert not names_a_path_of_one_machine(result["command"])
    assert not result["quick"]
    assert max(row["steps"] for row in result["drift"]) >= 8000
    keys = ("route", "state_dtype", "ring_len", "operands", "kind", "decay")
    seen = {tuple(row[key] for key in keys) for row in result["drift"]}
    assert len(seen) == 4 * len(drift_settings())
    assert {row["ring_len"] for row in result["drift"]} == {None, *RING_LENGTHS}
    assert {row["state_dtype"] for row in result["drift"]} == set(STATE_DTYPES)
    assert {row["operands"] for row in result["drift"]} == {None, "exact", *ROUNDED}


def test_every_shipped_model_was_studied(result):
    assert set(result["text"]) == set(SHIPPED)
    for rows in result["text"].values():
        assert len(rows) == len(text.SETTINGS)
        assert all(row["tokens"] >= 4000 for row in rows)


def test_every_shipped_model_was_scored_on_every_set(scores):
    assert scores["command"] in PAGE
    assert not names_a_path_of_one_machine(scores["command"])
    assert set(scores["task"]) == set(SHIPPED)
    for rows in scores["task"].values():
        assert [row["set"] for row in rows] == [name for name in SETS for _ in accuracy.SETTINGS]
        for row, setting in zip(rows, accuracy.SETTINGS * len(SETS), strict=True):
            assert setting.as_row().items() <= row.items()
            assert row["count"] >= 500


def test_scores_follow_from_their_counts(scores):
    for rows in scores["task"].values():
        bases = {row["set"]: row for row in rows if BASELINE.as_row().items() <= row.items()}
        assert all(bases[name]["changed"] == 0 for name in SETS)
        for row in rows:
            assert row["accuracy"] == row["right"] / row["count"]
            assert (row["low"], row["high"]) == accuracy.interval(row["right"], row["count"])
            assert row["right"] == bases[row["set"]]["right"] - row["lost"] + row["gained"]
            assert row["lost"] + row["gained"] <= row["changed"]


def test_one_set_can_tell_settings_apart(scores):
    """The usual set cannot, where every answer is right."""
    for rows in scores["task"].values():
        assert all(0.5 < row["accuracy"] < 0.95 for row in rows if row["set"] == "large")
