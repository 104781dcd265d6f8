"""Verdicts follow the numbers: each claim can be confirmed and refuted."""

import copy
import itertools

import pytest

from replayssm.study import claims, tables

BASE = {"float32": 1e-7, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture
def result():
    """Numbers under which every claim holds."""
    drift = []
    cases = itertools.product(("gdn", "kda"), ("slow", "fast"), (1024, 4096), BASE.items())
    for kind, decay, steps, (dtype, error) in cases:
        case = dict(kind=kind, decay=decay, steps=steps, state_dtype=dtype, state_error=error, output_error=error)
        packed = case | dict(route="packed", ring_len=None, operands=None)
        drift.append(packed | dict(state_error=3 * error, output_error=3 * error))
        drift += [case | dict(route="replay", ring_len=length, operands="exact") for length in (8, 16)]
    for row in [r for r in drift if (r["state_dtype"], r["operands"]) == ("float32", "exact")]:
        for operands, error in (("tf32", 1e-4), ("bf16", 1e-3)):
            drift.append(row | dict(operands=operands, state_error=error, output_error=error))
    forgetting = [dict(kind=k, decay=d, steps=4096, left=1e-6) for k in ("gdn", "kda") for d in ("slow", "fast")]
    measured = dict(bits_per_byte=1.1, top1=1.0, greedy_equal=1.0, greedy_rows=8, tokens=80, operands=None)
    text = [
        measured | dict(route=route, ring_len=length, state_dtype=dtype, greedy_repeats=share, sampled_repeats=share)
        for route, length in (("packed", None), ("replay", 8))
        for dtype, share in (("float16", 0.1), ("bfloat16", 0.2))
    ]
    return dict(drift=drift, forgetting=forgetting, text={"gdn": text})


def verdicts(result):
    return [claim["holds"] for claim in claims.judge(result)]


def test_all_hold(result):
    assert verdicts(result) == [True] * len(claims.CLAIMS)


def spoil(rows, **wanted):
    """One row that matches gets a hundred times the error."""
    row = next(r for r in rows if all(r[key] == value for key, value in wanted.items()))
    for key in ("state_error", "output_error"):
        row[key] *= 100


SPOILED = {
    0: dict(route="packed", state_dtype="float16", steps=4096, kind="kda"),
    3: dict(operands="exact", state_dtype="bfloat16", ring_len=8, steps=4096, kind="gdn", decay="fast"),
    4: dict(operands="exact", state_dtype="float16", ring_len=8, steps=4096, decay="slow"),
    5: dict(operands="exact", state_dtype="float32", ring_len=8, steps=4096, decay="slow"),
    6: dict(operands="exact", state_dtype="float32", ring_len=8, steps=4096, decay="fast", kind="kda"),
}


@pytest.mark.parametrize(("at", "wanted"), SPOILED.items())
def test_one_bad_layer_refutes(result, at, wanted):
    spoil(result["drift"], **wanted)
    if at == 6:
        spoil(result["drift"], **wanted)
    assert not verdicts(result)[at]


def test_cheap_rounding_refutes(result):
    for row in result["drift"]:
        if row["operands"] == "bf16":
            row["output_error"] = 5e-7
    assert not verdicts(result)[7]


def test_lasting_errors_refute(result):
    result["forgetting"][2]["left"] = 0.5
    assert not verdicts(result)[2]


@pytest.mark.parametrize("what", ["greedy_repeats", "sampled_repeats"])
def test_equal_repetition_refutes(result, what):
    result["text"]["gdn"][2][what] = 0.2
    assert not verdicts(result)[1]


def test_claims_without_numbers_are_left_out(result):
    assert len(verdicts(result | dict(text={}))) == len(claims.CLAIMS) - 1
    assert verdicts(dict(drift=[], forgetting=[], text={})) == []


def test_other_rows_do_not_count(result):
    want = claims.judge(copy.deepcopy(result))
    spoil(result["drift"], ring_len=16, operands="exact")
    spoil(result["drift"], route="packed", steps=1024)
    assert claims.judge(result) == want


def test_tables_show_every_part(result):
    result["claims"] = claims.judge(result)
    made = {table.title: table for table in tables.tables(result)}
    assert len(made) == 7
    state = made["relative state error after 4096 steps"]
    assert state.header == ("state", "decode", "GDN, slow", "GDN, fast", "KDA, slow", "KDA, fast")
    assert state.rows[2] == ["bfloat16", "packed", *["2.4e-02"] * 4]
    lines = state.markdown().splitlines()
    assert lines[1] == "| --- | --- | --: | --: | --: | --: |"
    assert len(lines) == 2 + 6
    assert all(len(row) == len(table.header) for table in made.values() for row in table.rows)
