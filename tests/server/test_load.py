"""Short runs of `load` and `overhead`, whose long runs are in the documentation."""

from __future__ import annotations

import pytest

from tests.server.load import loaded_server, run
from tests.server.overhead import measure


def test_a_crowd_that_asks_leaves_and_errs_loses_nothing():
    with loaded_server(slots=6, pages=20) as running:
        found = run(running, clients=24, seconds=8)
    assert found["outputs"]["abort"] >= 3
    assert found["outputs"].get("error", 0) == 0
    assert found["requests"]["queue full"] > 0
    assert sum(found["requests"].values()) > 60
    assert found["mean_slots_used"] > 3


@pytest.mark.slow
def test_the_server_adds_little_work(tmp_path):
    """CPU time, since the clock of a machine that runs other tests says little; the clock's account is in the docs."""
    found = measure("gdn", concurrency=64, requests=64, tokens=16, words=8, rounds=2, folder=tmp_path)
    assert {row[who]["tokens"] for row in found["rounds"] for who in ("engine", "server")} == {64 * 16}
    assert found["cpu_cost"] < 0.10, found
