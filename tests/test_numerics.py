"""docs/numerics.md shows the tables of the results beside it, and these are what the study now makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from replayssm.shipped import SHIPPED
from replayssm.spec import STATE_DTYPES
from replayssm.study import claims, tables, text
from replayssm.study.setting import RING_LENGTHS, ROUNDED, drift_settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "numerics.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def result():
    return json.loads((DOCS / "numerics" / "numerics.json").read_text(encoding="utf-8"))


def test_the_page_shows_every_table(result):
    for table in tables.tables(result):
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
    assert not re.search(r"(^|[\s=])[/~]", result["command"]), "a path of one machine"
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
