import json
import shlex

import pytest
import torch

from replayssm import ops
from replayssm.bench import serving_check
from replayssm.cli.parser import build_parser
from replayssm.engine import setup
from replayssm.engine.runner import Runner

KEYS = {
    "command", "name", "weights", "layers", "all_layers", "parameters", "dtype", "context", "ring_len",
    "prompt_tokens", "output_tokens", "chunk_tokens", "memory_fraction", "seed", "graphs", "overlap",
    "device", "versions", "measured", "plans", "ok", "rows",
}  # fmt: skip
BOTH = {
    "mode", "state_dtype", "status", "error", "check", "memory_bytes", "reserved_bytes", "ttft_ms", "tpot_ms",
    "tokens_per_s", "seconds", "vs_packed", "notes",
}  # fmt: skip
THROUGHPUT = BOTH | {
    "batch", "decode_tokens_per_s", "route", "steps", "periods", "gpu_busy", "gpu_ms", "gpu_activities",
}  # fmt: skip
LATENCY = BOTH | {"rate", "requests", "itl_ms", "e2e_ms", "preemptions"}
SMALL = ("--prompt-tokens", "7", "--output-tokens", "12", "--ring-len", "4", "--device", "cpu")


@pytest.fixture
def bench(cli, tiny):
    def call(suite, *words):
        return cli("bench", suite, "--config", tiny, "--dtype", "float32", *SMALL, *words)

    return call


def test_throughput_of_the_shipped_model(cli, tmp_path):
    file = tmp_path / "out.json"
    result = cli("bench", "throughput", "gdn", "--batch", "1,3", *SMALL, "--json", file)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert [line.split("  ")[0] for line in lines[:5]] == ["model", "device", "versions", "requests", "engine"]
    assert "gdn, " in lines[0]
    assert " million parameters, float32" in lines[0]
    assert "random" not in lines[0]
    plans = [line for line in lines if line.startswith("memory, mode ")]
    assert ["packed" in plans[0], "auto" in plans[1]] == [True, True]
    assert "ring" in plans[1]
    assert "ring" not in plans[0]
    head = next(i for i, line in enumerate(lines) if line.startswith("batch"))
    assert [line.split()[:3] for line in lines[head + 1 : head + 5]] == [
        [batch, "float32", mode] for batch in ("1", "3") for mode in ("auto", "packed")
    ]
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found.keys() == KEYS
    assert (found["ok"], found["weights"], found["context"], found["graphs"]) == (True, "loaded", 256, False)
    assert "transformers" in found["versions"]
    assert [plan["mode"] for plan in found["plans"]] == ["packed", "auto"]
    for plan in found["plans"]:
        assert sum(plan["split"].values()) == plan["budget"]
        assert plan["slots"] == 3
    for row in found["rows"]:
        assert row.keys() == THROUGHPUT
        assert row["status"] == "ok"
        assert row["route"] == ("packed" if row["mode"] == "packed" else "replay")
        assert row["check"]["status"] == ("reference" if row["mode"] == "packed" else "equal")
        assert (row["steps"], row["periods"], row["gpu_busy"]) == (8, 2, None)
        assert row["tpot_ms"]["mean"] == pytest.approx(1e3 * row["seconds"] / row["steps"])
        assert row["decode_tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["tpot_ms"]["mean"])
        assert row["tpot_ms"]["median"] <= row["tpot_ms"]["p99"]
        assert row["memory_bytes"] > 1e7
        same = [r for r in found["rows"] if r["mode"] == "packed" and r["batch"] == row["batch"]]
        assert row["vs_packed"] == pytest.approx(row["decode_tokens_per_s"] / same[0]["decode_tokens_per_s"])


def test_random_weights_are_said(bench, tiny):
    result = bench("throughput", "--batch", "2", "--layers", "3", "--mode", "replay", "--json", "-")
    assert result.code == 0, result
    assert len(result.out.splitlines()) == 1
    found = result.json
    assert (found["weights"], found["layers"], found["all_layers"]) == ("random weights", 3, 4)
    assert f"{tiny}, 0." in result.err
    assert "random weights, 3 of 4 layers" in result.err
    (row,) = found["rows"]  # packed decode ran for the check alone
    assert (row["mode"], row["route"], row["vs_packed"]) == ("replay", "replay", None)
    assert [plan["mode"] for plan in found["plans"]] == ["replay"]
    assert "for the check" in result.err


def test_sixteen_bits_and_a_near_tie(bench, monkeypatch):
    """Where rounding is coarse, a flip within the noise passes, with its place and gap."""
    real = serving_check.judge

    def judge(said, reference):
        last = said[0].logprobs[-1]
        other = next(token for token, _ in last.top if token != last.token)
        said[0].logprobs[-1] = last._replace(token=other)
        return real(said, reference)

    monkeypatch.setattr(serving_check, "judge", judge)
    monkeypatch.setattr(serving_check, "SAFETY", 1e9)
    result = bench("throughput", "--batch", "1", "--state-dtype", "bf16,fp16", "--mode", "replay,packed", "--json", "-")
    assert result.code == 0, result
    assert [(row["state_dtype"], row["mode"]) for row in result.json["rows"]] == [
        (state, mode) for state in ("bfloat16", "float16") for mode in ("replay", "packed")
    ]
    for row in result.json["rows"]:
        if row["mode"] == "replay":
            assert (row["check"]["status"], row["check"]["position"]) == ("near-tie", 11)
            assert row["check"]["gap"] > 0
    assert "near-tie replay, state bfloat16, B = 1: request 0 differs from packed at token 11, gap" in result.err


@pytest.mark.parametrize("how", ["never flushes", "mixes channels", "garbage", "crash"])
def test_a_broken_replay_gets_no_number(bench, monkeypatch, how):
    real = ops.fused_recurrent_linear_replayssm_decode
    if how == "never flushes":
        monkeypatch.setattr(ops, "gather_cursors", lambda cursor, slots: torch.zeros_like(slots))
    else:

        def wrong(*args, **options):
            if how == "crash":
                raise RuntimeError("out of registers")
            out = real(*args, **options)
            return out.normal_() if how == "garbage" else out.add_(0.01 * out.roll(1, -1))

        monkeypatch.setattr(ops, "fused_recurrent_linear_replayssm_decode", wrong)
    result = bench("throughput", "--batch", "1,3", "--mode", "replay,packed", "--json", "-")
    assert result.code == 1
    assert result.json["ok"] is False
    for row in result.json["rows"]:
        bad = row["mode"] == "replay"
        assert row["status"] == ("failed" if bad else "ok")
        assert (row["tpot_ms"] is None) == (row["decode_tokens_per_s"] is None) == bad
        assert row["vs_packed"] == (None if bad else 1)
        if bad:
            assert ("out of registers" if how == "crash" else "log-probabilities differ by") in row["error"]
    table = [line for line in result.err.splitlines() if line.startswith(("1 ", "3 ")) and "replay" in line]
    assert ["FAILED" in line for line in table] == [True, True]
    assert "FAILED replay, state float32, B = 3: " in result.err


def test_a_broken_packed_decode_takes_the_others_with_it(bench, monkeypatch):
    real = Runner.decode_forward
    monkeypatch.setattr(Runner, "decode_forward", lambda *args, **options: -real(*args, **options))
    for suite, load in (("throughput", ("--batch", "2")), ("latency", ("--requests", "3"))):
        result = bench(suite, *load, "--json", "-")
        assert result.code == 1
        errors = {row["mode"]: row["error"] for row in result.json["rows"]}
        assert "a forward over the whole text differ by" in errors["packed"]
        assert "did not pass its own check" in errors["auto"]
        assert all(row["tpot_ms"] is None for row in result.json["rows"])


def test_latency(bench, tmp_path):
    file = tmp_path / "out.json"
    words = ("--rate", "200,inf", "--requests", "5", "--max-requests", "2")
    result = bench("latency", *words, "--json", file)
    assert result.code == 0, result
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found.keys() == KEYS
    assert [(row["rate"], row["mode"]) for row in found["rows"]] == [
        (rate, mode) for rate in (200, None) for mode in ("auto", "packed")
    ]
    assert found["plans"][0]["slots"] == 2
    for row in found["rows"]:
        assert row.keys() == LATENCY
        assert (row["status"], row["requests"]) == ("ok", 5)
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert list(row[name]) == ["mean", "median", "p90", "p99"]
        assert row["ttft_ms"]["mean"] + 11 * row["tpot_ms"]["mean"] == pytest.approx(row["e2e_ms"]["mean"])
        assert row["itl_ms"]["mean"] == pytest.approx(row["tpot_ms"]["mean"])
        assert row["tokens_per_s"] == pytest.approx(60 / row["seconds"])
        base = [r for r in found["rows"] if r["mode"] == "packed" and r["rate"] == row["rate"]]
        assert row["vs_packed"] == pytest.approx(row["tokens_per_s"] / base[0]["tokens_per_s"])
    cells = [line.split()[:3] for line in result.out.splitlines() if line.startswith(("200 ", "inf "))]
    assert cells == [[rate, "float32", mode] for rate in ("200", "inf") for mode in ("auto", "packed")]


@pytest.mark.parametrize(
    "words",
    [
        ("throughput",),
        ("throughput", "gdn", "--batch", "2,4", "--mode", "packed,replay", "--no-graphs", "--plot", "a b.png"),
        ("throughput", "--config", "Qwen3.5-4B", "--layers", "8", "--state-dtype", "bf16,fp32", "--context", "512"),
        ("latency", "--rate", "2.5,inf", "--requests", "9", "--max-requests", "3", "--no-overlap", "--seed", "4"),
        ("latency", "--config", "qwen3.5-0.8b", "--chunk-tokens", "512", "--page-size", "32", "--device", "cuda:1"),
    ],
)
def test_a_command_reproduces_itself(words, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)

    def request(line):
        args = build_parser().parse_args(line)
        return args.request(args)

    first = request(["bench", *words])
    again = request(shlex.split(first.command)[1:])
    assert again.command == first.command
    assert (again.modes, again.state_dtypes, again.dtype) == (first.modes, first.state_dtypes, first.dtype)
    options = [one.engine_options("auto", "float32", 512, None) for one in (first, again)]
    assert options[0] == options[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["throughput", "gnd"], "did you mean 'gdn'"),
        (["throughput", "--config", "Qwen3.5-4"], "nearest: Qwen3.5-4B"),
        (["throughput", "--config", "zzz"], "nearest: Qwen3.5-0.8B, Qwen3.5-4B, Qwen3.5-35B-A3B, Kimi-Linear-48B-A3B"),
        (["throughput", "gdn", "--config", "Qwen3.5-4B"], "--config Qwen3.5-4B asks for random ones"),
        (["throughput", "gdn", "--layers", "4"], "--layers 4 needs --config"),
        (["throughput", "--config", "Qwen3.5-4B", "--layers", "33"], "--layers 33 exceeds the 32"),
        (["throughput", "--config", "Qwen3.5-4B", "--layers", "3"], "needs its first 4 at least"),
        (["throughput", "--batch", "8,0"], "--batch 0 is below 1"),
        (["throughput", "--mode", "auto,fast"], "--mode 'fast' is unknown; use one or more of auto, replay, packed"),
        (["throughput", "--state-dtype", "int8"], "'int8'"),
        (["throughput", "--ring-len", "65"], "65 is outside"),
        (["throughput", "--prompt-tokens", "0"], "--prompt-tokens 0 is below 1"),
        (["throughput", "--seed", "-1"], "--seed -1 is below 0"),
        (["throughput", "--memory-fraction", "1.5"], "1.5 is outside (0, 1]"),
        (["throughput", "--page-size", "0"], "0 is below 1"),
        (["throughput", "--chunk-tokens", "1"], "1 is below 2"),
        (["throughput", "--context", "255"], "make 256 tokens, above --context 255"),
        (["throughput", "--context", "8192"], "--context 8192 exceeds the model's 4096 positions"),
        (["throughput", "--prompt-tokens", "4000"], "make 4128 tokens, the model has 4096 positions"),
        (["throughput", "--output-tokens", "20"], "since their prompts take up to 17 steps; ask for 26 or more"),
        (["throughput", "--device", "meta"], "no backend for device 'meta'"),
        (["throughput", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["throughput", "--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["latency", "--rate", "0"], "--rate '0' is no number of requests a second above 0"),
        (["latency", "--rate", "1,fast"], "'fast'"),
        (["latency", "--rate", "nan"], "'nan'"),
        (["latency", "--requests", "0"], "--requests 0 is below 1"),
        (["latency", "--max-requests", "0"], "--max-requests 0 is below 1"),
        (["latency", "--output-tokens", "5000"], "the model has 4096 positions"),
    ],
)
def test_bad_input(refused, words, said):
    if "--output-tokens" in words and "latency" not in words:
        words = [*words, "--batch", "256"]
    elif "throughput" in words and "--batch" not in words:
        words = [*words, "--batch", "1"]
    assert said in refused("bench", *words)


@pytest.mark.parametrize(("suite", "option"), [("throughput", "--batch"), ("latency", "--max-requests")])
@pytest.mark.parametrize("modes", ["packed", "replay"])
def test_more_requests_than_slots(refused, tiny, monkeypatch, suite, option, modes):
    """Memory for a few requests: both numbers, before anything runs."""
    monkeypatch.setattr(setup, "_work_bytes", lambda *args: 0)
    monkeypatch.setattr(setup, "CPU_BESIDES_WEIGHTS", 600_000)
    monkeypatch.setattr(Runner, "launch", lambda *args: pytest.fail("a step ran"))
    said = refused("bench", suite, "--config", tiny, "--dtype", "float32", *SMALL, "--mode", modes, option, "15")
    assert f"{option} 15 exceeds the " in said
    assert 1 < int(said.split("exceeds the ")[1].split()[0]) < 15
    assert " in mode packed with state float32, besides weights of " in said
    assert "raise --memory-fraction" in said


def test_plots(bench, tmp_path):
    pytest.importorskip("matplotlib")
    for suite, load in (("throughput", ("--batch", "1")), ("latency", ("--requests", "2"))):
        file = tmp_path / f"{suite}.svg"
        result = bench(suite, *load, "--mode", "packed", "--plot", file)
        assert result.code == 0, result
        assert file.read_text(encoding="utf-8").startswith("<?xml")
        assert f"plot: {file}" in result.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(cli):
    words = ("gdn", "--batch", "1,8", "--prompt-tokens", "16", "--output-tokens", "40", "--device", "cuda")
    result = cli("bench", "throughput", *words, "--mode", "auto,replay,packed", "--json", "-")
    assert result.code == 0, result
    for row in result.json["rows"]:
        assert row["notes"] == []
        assert 0 < row["gpu_busy"] <= 1
        assert row["gpu_ms"] > 0
    result = cli("bench", "latency", *words[:1], *words[3:], "--rate", "50,inf", "--requests", "20", "--json", "-")
    assert result.code == 0, result
