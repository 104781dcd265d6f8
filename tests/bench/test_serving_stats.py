import random

import numpy as np
import pytest

from replayssm.bench import serving_stats as stats


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1001])
def test_summary_is_that_of_numpy(count):
    draw = random.Random(count)
    seconds = [draw.lognormvariate(-4, 1) for _ in range(count)]
    found = stats.summary(seconds, stats.LONG)
    assert list(found) == ["mean", "median", "p90", "p99"]
    wanted = [np.mean(seconds), np.median(seconds), np.percentile(seconds, 90), np.percentile(seconds, 99)]
    assert list(found.values()) == pytest.approx([1e3 * value for value in wanted])


def test_summary_of_nothing():
    assert stats.summary([]) is None
    assert list(stats.summary([0.5])) == ["mean", "median", "p99"]


def test_gaps():
    assert stats.gaps([1.0, 1.5, 3.0]) == [0.5, 1.5]
    assert stats.gaps([2.0]) == []


def test_union_counts_what_overlaps_once():
    assert stats.union([]) == 0
    assert stats.union([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4
    draw = random.Random(0)
    spans = [(start, start + draw.randrange(1, 9)) for start in (draw.randrange(200) for _ in range(40))]
    assert stats.union(spans) == len({at for start, end in spans for at in range(start, end)})


def row(mode, rate, batch=1, state="float32"):
    return dict(mode=mode, batch=batch, state_dtype=state, speed=rate)


def test_ratios_compare_equal_load_and_state_dtype_only():
    rows = [
        row("auto", 30.0),
        row("packed", 20.0),
        row("auto", 90.0, batch=8),
        row("packed", None, batch=8),
        row("replay", None),
        row("packed", 40.0, state="bfloat16"),
        row("auto", 50.0, state="bfloat16"),
    ]
    stats.add_ratios(rows, "batch", "speed")
    assert [r["vs_packed"] for r in rows] == [1.5, 1, None, None, None, 1, 1.25]
