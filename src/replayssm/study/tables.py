"""Tables of a study's results: the same for the terminal and for docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from replayssm.spec import DEFAULT_RING_LEN, STATE_DTYPES
from replayssm.study.setting import ROUNDED, ROUNDED_RINGS
from replayssm.study.task import SETS

# Of a model's table: key of the row, digits after the point.
COLUMNS = dict(bits_per_byte=5, top1=4, greedy_equal=3, greedy_rows=0, greedy_repeats=3, sampled_repeats=3)


class Table(NamedTuple):
    """Cells as text; the first `left` columns to the left."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    left: int = 1

    def markdown(self) -> str:
        """As a page holds it."""
        rule = ["---" if i < self.left else "--:" for i in range(len(self.header))]
        return "\n".join("| " + " | ".join(row) + " |" for row in [list(self.header), rule, *self.rows])


def tables(result: dict[str, Any]) -> list[Table]:
    """Of what was measured."""
    made = [_drift(result, "state_error"), _drift(result, "output_error"), _ring(result), _forgetting(result)]
    made += [_rounding(result), *(_text(model, rows) for model, rows in result["text"].items()), _claims(result)]
    return [table for table in made if table.rows]


def _cases(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["kind"], row["decay"]) for row in rows))


def _heads(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{kind.upper()}, {decay}" for kind, decay in _cases(rows)]


def _end(rows: list[dict[str, Any]]) -> int:
    return max((row["steps"] for row in rows), default=0)


def _decode(row: dict[str, Any]) -> str:
    """How a row was decoded: 'replay, L = 8'."""
    name = row["route"] if row["ring_len"] is None else f"{row['route']}, L = {row['ring_len']}"
    return name if row["operands"] in (None, "exact") else f"{name}, {row['operands']} operands"


def _case(row: dict[str, Any]) -> tuple[str, str]:
    return row["kind"], row["decay"]


def _drift(result: dict[str, Any], what: str) -> Table:
    rows, end = result["drift"], _end(result["drift"])
    cells = []
    for dtype in STATE_DTYPES:
        for length, operands in ((None, None), (DEFAULT_RING_LEN, "exact")):  # packed, replay
            wanted = (dtype, length, operands, end)
            mine = [r for r in rows if (r["state_dtype"], r["ring_len"], r["operands"], r["steps"]) == wanted]
            if mine:
                cells.append([dtype, _decode(mine[0]), *(f"{r[what]:.1e}" for r in mine)])
    name = what.replace("_", " ")
    return Table(f"relative {name} after {end} steps", ("state", "decode", *_heads(rows)), cells, 2)


def _ring(result: dict[str, Any]) -> Table:
    rows, end = [r for r in result["drift"] if r["operands"] == "exact"], _end(result["drift"])
    cells = []
    for dtype in STATE_DTYPES:
        for case in _cases(rows):
            mine = [r for r in rows if _case(r) == case and (r["state_dtype"], r["steps"]) == (dtype, end)]
            cells.append([dtype, f"{case[0].upper()}, {case[1]}", *(f"{r['state_error']:.1e}" for r in mine)])
    header = ("state", "layer", *(f"L = {n}" for n in dict.fromkeys(r["ring_len"] for r in rows)))
    return Table(f"relative state error after {end} steps, by ring length", header, cells, 2)


def _forgetting(result: dict[str, Any]) -> Table:
    rows = result["forgetting"]
    marks = list(dict.fromkeys(row["steps"] for row in rows))
    cells = [
        [f"{kind.upper()}, {decay}", *(f"{r['left']:.1e}" for r in rows if _case(r) == (kind, decay))]
        for kind, decay in _cases(rows)
    ]
    return Table("what is left of an error of step 0", ("layer", *map(str, marks)), cells)


def _rounding(result: dict[str, Any]) -> Table:
    rows, end = result["drift"], _end(result["drift"])
    cells = []
    for operands in ("exact", *ROUNDED):
        for length in ROUNDED_RINGS:
            wanted = ("float32", operands, length, end)
            mine = [r for r in rows if (r["state_dtype"], r["operands"], r["ring_len"], r["steps"]) == wanted]
            if mine:
                errors = (f"{r['state_error']:.1e}, {r['output_error']:.1e}" for r in mine)
                cells.append([operands, str(length), *errors])
    title = f"rebuild with rounded operands, fp32 state: relative error of state, output after {end} steps"
    return Table(title, ("operands", "L", *_heads(rows)), cells, 2)


def _text(model: str, rows: list[dict[str, Any]]) -> Table:
    cells = []
    for r in rows:
        numbers = (f"{r[key]:.{digits}f}" for key, digits in COLUMNS.items())
        cells.append([_decode(r), r["state_dtype"] or "–", *numbers])
    header = (
        "decode", "state", "bits per byte", "same top token", "greedy tokens before a difference", "rows equal",
        "repeats, greedy", "repeats, sampled",
    )  # fmt: skip
    tokens = rows[0]["tokens"] if rows else 0
    return Table(f"model {model}, {tokens} tokens each", header, cells, 2)


def scores(result: dict[str, Any]) -> list[Table]:
    """Of `study task`: a table for each model and set of problems."""
    made = []
    for model, all_rows in result["task"].items():
        for kind in dict.fromkeys(r["set"] for r in all_rows):
            rows = [r for r in all_rows if r["set"] == kind]
            cells = []
            for r in rows:
                share = (f"{r['accuracy']:.3f}", f"{r['low']:.3f} … {r['high']:.3f}")
                paired = (str(r[key]) for key in ("lost", "gained", "changed"))
                cells.append([_decode(r), r["state_dtype"] or "–", *share, *paired])
            title = f"model {model}, {rows[0]['count']} {SETS[kind].title}"
            made.append(Table(title, ("decode", "state", "right", "95 %", "lost", "gained", "changed"), cells, 2))
    return made


def _claims(result: dict[str, Any]) -> Table:
    cells = [
        [c["claim"], "confirmed" if c["holds"] else "refuted", f"{c['value']:.3g}", c["decided_by"]]
        for c in result["claims"]
    ]
    return Table("claims", ("claim", "", "value", "decided by"), cells, 4)
