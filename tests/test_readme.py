"""The numbers in the README's table are those of the traffic model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replayssm.bench.geometry import GEOMETRIES
from replayssm.models.loading import load_model
from replayssm.spec import DEFAULT_RING_LEN, packed_traffic, replay_traffic

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+?) \| ([\d.]+) \+ ([\d.]+) MiB \| ([\d.]+) \+ ([\d.]+) MiB \| ([\d.]+) \|$", re.M)
ROWS = {row[0]: [float(x) for x in row[1:]] for row in ROW.findall(README)}
NAMES = {
    "Qwen3.5-4B, 9B": "Qwen3.5-4B",
    "Qwen3-Next-80B-A3B": "Qwen3-Next-80B-A3B",
    "OLMo-Hybrid-7B": "OLMo-Hybrid-7B",
    "Kimi-Linear-48B-A3B (KDA)": "Kimi-Linear-48B-A3B",
}


def numbers(specs, io):
    packed = [sum(column) / 2**20 for column in zip(*(packed_traffic(s) for s in specs), strict=True)]
    replay = [
        sum(column) / 2**20
        for column in zip(*(replay_traffic(s, DEFAULT_RING_LEN, io_dtype=io) for s in specs), strict=True)
    ]
    return [*packed, *replay, sum(replay) / sum(packed)]


@pytest.mark.parametrize("row", NAMES)
def test_known_models(row):
    entry = GEOMETRIES[NAMES[row]]
    want = numbers([entry.spec] * entry.linear_layers, "bfloat16")
    assert ROWS[row] == pytest.approx(want, abs=0.051)
    assert ROWS[row][4] == pytest.approx(want[4], abs=0.0006)


def test_shipped_model():
    """Counted over 199 steps, which are not whole periods, so that the last digit may differ from the mean."""
    want = numbers(load_model("gdn").specs, "float32")
    assert ROWS["shipped `gdn`, counted on a CPU"] == pytest.approx(want, abs=0.011)


def test_every_row_is_tested():
    assert set(ROWS) == {*NAMES, "shipped `gdn`, counted on a CPU"}
