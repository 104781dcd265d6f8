import importlib.util
import json

import pytest

from replayssm import ops
from replayssm.bench import ceilings, peers, timing
from replayssm.kernels import policy

TINY = ("bench", "decode", "--heads", "1/2", "--dims", "16/24", "--batch", "1,3", "--ring-len", "4", "--quick")
ROW_KEYS = {
    "batch", "state_dtype", "kernel", "route", "peer", "status", "error", "check", "us", "us_p10", "us_p90", "periods",
    "steps", "bytes", "gb_per_s", "ceiling", "of_ceiling", "vs_packed", "vs_best_peer", "auto_route", "auto_vs_packed",
    "copies", "working_set", "graph", "notes",
}  # fmt: skip
KEYS = {
    "command", "name", "layer", "ring_len", "io_dtype", "quick", "device", "versions", "ceilings", "skipped", "ok",
    "rows",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Buffers of kilobytes, on the CPU."""
    monkeypatch.setattr(timing, "CPU_WORKING_SET_QUICK", 10_000)
    monkeypatch.setattr(ceilings, "CPU_BYTES_QUICK", 1 << 20)


def decode(cli, *words):
    return cli(*TINY, "--device", "cpu", *words)


def test_table(cli):
    result = decode(cli, "--kind", "kda", "--state-dtype", "fp32,bf16")
    assert result.code == 0, result
    lines = result.out.splitlines()
    starts = ["device", "versions", "layer", "decode", "read ceiling", "read+write ceiling", "launch floor"]
    assert [line.split("   ")[0].strip() for line in lines[:7]] == starts
    head = next(i for i, line in enumerate(lines) if line.startswith("batch"))
    cells = [line.split() for line in lines[head + 1 : head + 9]]
    assert [c[:3] for c in cells] == [
        [b, s, k] for s in ("float32", "bfloat16") for b in ("1", "3") for k in ("packed", "replay")
    ]
    assert "skipped fla-core recurrent, state float32: runs on CUDA only" in result.out
    assert "fixed size" in result.out
    assert "packed, B = 1" in result.err


def test_json_file_has_the_documented_keys(cli, tmp_path):
    file = tmp_path / "out.json"
    result = decode(cli, "--json", file)
    assert result.code == 0, result
    assert "of ceiling" in result.out
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found.keys() == KEYS
    assert found["ok"] is True
    assert found["layer"] == {
        "kind": "gdn", "num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 24, "lower_bound": None,
        "beta_scale": 1.0,
    }  # fmt: skip
    assert found["ceilings"].keys() == {"read", "read_write", "launch_us"}
    assert all(value > 0 for value in found["ceilings"].values())
    assert found["command"].startswith("replayssm bench decode --quick --heads 1/2")
    for row in found["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["status"] == "ok"
        assert row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["steps"] == 4 * row["copies"]
        assert row["working_set"] > 10_000
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["of_ceiling"] == pytest.approx(row["gb_per_s"] / found["ceilings"][row["ceiling"]])
        assert row["auto_route"] == ("replay" if row["kernel"] == "replay" else None)  # a CPU always replays
    assert [row["ceiling"] for row in found["rows"]] == ["read_write", "read"] * 2


@pytest.mark.parametrize("least", [6, 7, None])
def test_auto_is_the_route_of_the_policy(cli, monkeypatch, least):
    """1 and 3 rows of 2 heads: the replay row says what mode auto takes, with packed at 1.00."""
    monkeypatch.setitem(policy.FROM_HEADS, "cpu", {(False, 4): {1: least}})
    result = decode(cli, "--json", "-")
    for row in result.json["rows"]:
        route = None
        if row["kernel"] == "replay":
            route = "replay" if row["batch"] == 3 and least == 6 else "packed"
        assert row["auto_route"] == route
        assert row["auto_vs_packed"] == {None: None, "packed": 1, "replay": row["vs_packed"]}[route]
    table = [line for line in result.err.splitlines() if line.startswith(("1 ", "3 "))]
    assert ["packed 1.00" in line for line in table] == [False, True, False, least != 6]
    assert "auto: what mode auto takes" in result.err


def test_json_alone_on_standard_output(cli):
    result = decode(cli, "--json", "-")
    assert len(result.out.splitlines()) == 1
    assert result.json.keys() == KEYS
    assert "of ceiling" in result.err


@pytest.mark.parametrize("how", ["garbage", "crash"])
def test_a_wrong_kernel_gets_no_number(cli, monkeypatch, how):
    real = ops.fused_recurrent_linear_replayssm_decode

    def wrong(*args, **options):
        if how == "crash":
            raise RuntimeError("out of registers")
        return real(*args, **options).normal_()

    monkeypatch.setattr(ops, "fused_recurrent_linear_replayssm_decode", wrong)
    result = decode(cli, "--json", "-")
    assert result.code == 1
    assert result.json["ok"] is False
    for row in result.json["rows"]:
        bad = row["kernel"] == "replay"
        assert row["status"] == ("failed" if bad else "ok")
        assert (row["us"] is None) == bad
        assert (row["gb_per_s"] is None) == bad
        if bad:
            assert ("limit" if how == "garbage" else "RuntimeError: out of registers") in row["error"]
    table = [line for line in result.err.splitlines() if line.startswith(("1 ", "3 ")) and "replay" in line]
    assert ["FAILED" in line for line in table] == [True, True]
    assert "FAILED replay, B = 3, state float32: " in result.err


def test_a_period_that_moves_other_bytes_gets_no_number(cli, monkeypatch):
    real = timing.period
    monkeypatch.setattr(timing, "period", lambda runner, case: [real(runner, case) for _ in range(2)])
    result = decode(cli, "--json", "-")
    assert result.code == 1
    assert all("a period moves" in row["error"] for row in result.json["rows"])


def test_peers_are_compared(cli, monkeypatch):
    from replayssm.bench.kernels import Own

    peer = peers.Peer("twin", "packed", lambda shape: None, lambda case: Own(case, "packed"), ("a note",))
    monkeypatch.setattr(peers, "PEERS", [peer])
    monkeypatch.setattr("replayssm.bench.run.PEERS", [peer])
    result = decode(cli, "--json", "-")
    rows = {(row["batch"], row["kernel"]): row for row in result.json["rows"]}
    assert rows[3, "twin"]["vs_best_peer"] == 1
    assert rows[3, "replay"]["vs_best_peer"] == pytest.approx(rows[3, "twin"]["us"] / rows[3, "replay"]["us"])
    assert "note twin: a note" in result.err


@pytest.mark.parametrize(("tolerance", "code"), [(0.0, 1), (0.03, 0)])
def test_only_a_named_tolerance_lets_an_inexact_peer_pass(cli, monkeypatch, tolerance, code):
    from replayssm.bench.kernels import Own

    class Off(Own):
        def output(self, copy):
            return super().output(copy) * 1.02

    def make(case):
        return Off(case, "packed")

    listed = [
        peers.Peer("rough", "packed", lambda shape: None, make, kind="gdn", tolerance=tolerance),
        peers.Peer("other", "packed", lambda shape: "never asked", make, kind="kda"),
    ]
    monkeypatch.setattr("replayssm.bench.run.PEERS", listed)
    result = decode(cli, "--kind", "gdn", "--json", "-")
    assert result.code == code
    assert not result.json["skipped"]
    assert all((row["us"] is None) == (code == 1 and row["peer"]) for row in result.json["rows"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "Qwen3.5-9"], "Qwen3.5-9B"),
        (["--model", "Qwen3.5-9B", "--heads", "1/2"], "--heads"),
        (["--batch", "8,0"], "--batch 0 is below 1"),
        (["--batch", "-4"], "below 1"),
        (["--batch", "8,x"], "'x' is not a whole number"),
        (["--batch", ""], "not a whole number"),
        (["--dims", "128/257"], "V = 257 is outside 1…256"),
        (["--dims", "a/b"], "--dims 'a/b'"),
        (["--heads", "3/32"], "3 key heads do not divide 32"),
        (["--heads", "1/2/3"], "--heads '1/2/3'"),
        (["--kind", "mamba"], "'mamba' is unknown"),
        (["--state-dtype", "fp32,int8"], "'int8'"),
        (["--io-dtype", "fp64"], "--io-dtype has dtype fp64"),
        (["--ring-len", "65"], "65 is outside"),
        (["--device", "meta"], "no backend for device 'meta'"),
        (["--device", "abacus"], "no torch device"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bad_input(refused, words, said):
    assert said in refused("bench", "decode", *words)


def test_a_suite_must_be_named(refused):
    assert "SUITE" in refused("bench")


def test_a_plot_needs_its_package(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'replayssm[bench]'" in refused(*TINY, "--plot", tmp_path / "x.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert ".svg" in refused(*TINY, "--plot", tmp_path / "x.gif")


def test_plot(cli, tmp_path):
    pytest.importorskip("matplotlib")
    result = decode(cli, "--plot", tmp_path / "out.svg", "--state-dtype", "fp32,bf16")
    assert result.code == 0, result
    text = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
