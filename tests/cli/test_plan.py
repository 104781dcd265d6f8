import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replayssm.planner.checkpoints import GEOMETRIES
from replayssm.planner.estimate import Settings, request_bytes
from replayssm.planner.request import parse_size
from replayssm.spec import packed_traffic, replay_traffic

KEYS = {"model", "source", "layer", "linear_layers", "attention", "settings", "weights", "request", "step", "ring"}
KEYS |= {"capacity", "spec"}
HELD = {"state", "ring", "conv", "kv", "drafts", "total"}
STATES = ["ring", "snapshot", "kv-replay", "fold"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("REPLAYSSM_STATE_DTYPE", raising=False)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_known_checkpoint(cli, name):
    result = cli("plan", f"someone/{name.upper()}", "--memory", "10TB", "--json")
    assert result.code == 0, result
    found, geometry = result.json, GEOMETRIES[name]
    assert found["model"] == name
    assert found["request"]["packed"]["state"] == geometry.state_bytes
    assert found["weights"]["bytes"] == (geometry.weight_bytes or 0)
    assert found["ring"]["best"] == found["ring"]["best_formula"]


def test_json(cli):
    words = ["--batch", "1,64", "--ring-len", "10", "--state-dtype", "fp16", "--io-dtype", "fp32"]
    words += ["--kv-dtype", "fp8", "--context", "1000"]
    result = cli("plan", "Qwen3.5-4B", *words, "--memory", "80GB", "--spec", "4", "--json")
    assert result.code == 0, result
    assert len(result.out.splitlines()) == 1
    assert "memory of a request" in result.err
    found = result.json
    assert found.keys() == KEYS
    assert found["settings"] == {
        "ring_len": 10, "state_dtype": "float16", "io_dtype": "float32", "kv_dtype": "float8", "context": 1000,
        "state_dtype_source": "option", "tp": 1,
    }  # fmt: skip
    spec, linear = GEOMETRIES["Qwen3.5-4B"].spec, 24
    assert found["request"].keys() == {"layer", "packed", "replay"}
    assert found["request"]["layer"].keys() == HELD - {"total"}
    for mode in ("packed", "replay"):
        held = found["request"][mode]
        assert held.keys() == HELD
        assert held["total"] == sum(held.values()) - held["total"]
    assert found["request"]["replay"]["kv"] == 8 * 1000 * 2 * 4 * 256
    assert found["request"]["replay"]["ring"] == 24 * 10 * spec.record_bytes("float32")

    packed, replay = packed_traffic(spec, "float16"), replay_traffic(spec, 10, "float16", "float32")
    for row, batch in zip(found["step"], (1, 64), strict=True):
        assert row.keys() == {"batch", "layer", "all", "simplest", "ratio"}
        for mode, want in (("packed", packed), ("replay", replay)):
            for layers, part in ((1, "layer"), (linear, "all")):
                assert row[part][mode] == pytest.approx(
                    {key: batch * layers * getattr(want, key) for key in ("read", "written", "total")}
                )
        assert row["ratio"] == pytest.approx(replay.total / packed.total)
        assert row["simplest"]["packed"] == 2 * row["simplest"]["replay"] == row["all"]["packed"]["total"]

    ring = found["ring"]
    assert len(ring["bytes_by_length"]) == 64
    assert ring["best_bytes"] == min(ring["bytes_by_length"]) == ring["bytes_by_length"][ring["best"] - 1]
    assert ring["chosen_bytes"] == ring["bytes_by_length"][9] == pytest.approx(linear * replay.total)
    assert ring["bytes_by_length"][0] == ring["packed_bytes"]

    capacity = found["capacity"]
    assert capacity["memory"] == 80 * 10**9
    assert [(row["mode"], row["draft_tokens"]) for row in capacity["rows"]] == [
        ("packed", 0), ("replay", 0), ("ring", 4), ("snapshot", 4), ("kv-replay", 4), ("fold", 4)
    ]  # fmt: skip
    for row in capacity["rows"]:
        free = capacity["memory"] - capacity["weights"]
        assert row["requests"] * row["total"] <= free < (row["requests"] + 1) * row["total"]
    plain, replay, ring, snapshot, kv_replay, fold = (row["requests"] for row in capacity["rows"])
    assert plain > replay
    assert plain > max(kv_replay, fold) >= min(kv_replay, fold) > ring > snapshot

    spec = found["spec"]
    assert (spec["drafts"], spec["window"], spec["ring_len"]) == (4, 5, 10)
    assert list(spec["strategies"]) == STATES
    for row in capacity["rows"][2:]:
        held = spec["strategies"][row["mode"]]
        assert {key: row[key] for key in HELD} == {key: held[key] for key in HELD}
        assert held["per_snapshot"] == spec["strategies"]["snapshot"]["total"] / held["total"]
        assert held["per_snapshot_without_kv"] >= held["per_snapshot"] >= 1


def test_tables(cli):
    result = cli("plan", "Kimi-Linear-48B-A3B", "--batch", "8", "--memory", "141GB", "--spec", "4")
    assert result.code == 0, result
    for text in (
        "20 (kda, 32/32 heads, K/V 128/128)", "7 (latent 576)", "91.5 GiB (bf16, text model)", "40.0 MiB",
        "fewest bytes at L = 10 (minimum over real L: 10.0): 0.603 of packed, 0.605 at L = 8",
        "Fewest bytes is not fastest", "requests in 131 GiB", "4 drafts, snapshot", "state alone",
        "ring of 16, for windows of 5 tokens; --ring-len takes",
        "requests per snapshot's",
    ):  # fmt: skip
        assert text in result.out, text
    assert not result.err


@pytest.mark.parametrize(
    "words", [("Qwen3.5-122B-A10B", "--tp", "2"), ("Kimi-Linear-48B-A3B",)], ids=lambda words: words[0]
)
def test_a_ring_holds_three_times_the_requests_of_snapshots_on_a_gpu(cli, words):
    result = cli("plan", *words, "--memory", "141GB", "--spec", "4")
    fit = {name: re.search(rf"^4 drafts, {name} .* (\d+) +([\d.]+)$", result.out, re.M).groups() for name in STATES}
    ring, times = int(fit["ring"][0]), float(fit["ring"][1])
    assert ring >= 3 * int(fit["snapshot"][0]) > 0
    assert times == pytest.approx(ring / int(fit["snapshot"][0]), abs=0.0051)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_known_checkpoint_with_drafts(cli, name):
    words = ("plan", name, "--spec", "4", "--weights", "1GB", "--memory", "500GB", "--json")
    found = cli(*words).json
    fit = {row["mode"]: row["requests"] for row in found["capacity"]["rows"]}
    assert fit["snapshot"] < fit["ring"] < fit["fold"] <= fit["kv-replay"] < fit["packed"]
    alone = found["spec"]["strategies"]["ring"]["per_snapshot_without_kv"]
    assert 4 < alone < 6


def test_some_strategies_and_a_ring_of_ones_own(cli):
    result = cli("plan", "gdn", "--spec", "6", "--spec-state", "snapshot, ring", "--ring-len", "8", "--json")
    assert list(result.json["spec"]["strategies"]) == ["ring", "snapshot"]
    assert result.json["spec"]["ring_len"] == 8
    assert "ring of 8, for windows of 7 tokens\n" in result.err
    result = cli("plan", "gdn", "--spec", "1", "--spec-state", "fold", "--json")
    assert result.json["spec"]["ring_len"] is None
    assert "ring of" not in result.err
    assert cli("plan", "gdn", "--json").json["spec"] is None
    assert cli("plan", "gdn", "--draft-tokens", "30", "--json").json["spec"]["ring_len"] == 64


def test_one_shard(cli):
    words = ("plan", "Qwen3-Next-80B-A3B", "--memory", "141GB", "--json")
    whole, half = cli(*words, "--weights", "100GB").json, cli(*words, "--weights", "100GB", "--tp", "2").json
    assert half["weights"]["bytes"] == 50 * 10**9
    for key in HELD - {"total"}:
        assert 2 * half["request"]["replay"][key] == whole["request"]["replay"][key]
    assert 2 * half["step"][0]["all"]["replay"]["total"] == whole["step"][0]["all"]["replay"]["total"]
    assert half["capacity"]["rows"][1]["requests"] > 2 * whole["capacity"]["rows"][1]["requests"]
    assert "one of 2" in cli(*words[:2], "--tp", "2").out


def test_a_folder_and_what_its_config_says(cli, copy):
    file = copy / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "mamba_ssm_dtype": "bfloat16"}))
    found = cli("plan", copy, "--json").json
    assert found["settings"]["state_dtype"] == "bfloat16"
    assert found["settings"]["state_dtype_source"] == "model config mamba_ssm_dtype"
    assert found["weights"]["bytes"] == (copy / "model.safetensors").stat().st_size
    (copy / "model.safetensors").unlink()
    result = cli("plan", file)
    assert "unknown, not counted (no safetensors files beside it)" in result.out
    assert cli("plan", file, "--json").json["weights"]["bytes"] == 0


def test_the_environment_chooses_the_state(cli, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_STATE_DTYPE", "fp16")
    found = cli("plan", "gdn", "--json").json
    assert found["settings"]["state_dtype"] == "float16"
    assert found["request"]["packed"]["state"] == 6 * 4 * 128 * 128 * 2


def test_reserve_and_zero_requests(cli):
    found = cli("plan", "gdn", "--memory", "22MB", "--reserve", "4MB", "--json").json
    assert found["capacity"]["reserve"] == 4_000_000
    assert [row["requests"] for row in found["capacity"]["rows"]] == [0, 0]
    need = request_bytes(GEOMETRIES["Qwen3.5-0.8B"], Settings(), "replay").total
    for size, fit in ((3 * need, 3), (3 * need - 1, 2)):
        rows = cli(
            "plan", "Qwen3.5-0.8B", "--memory", f"{size + 1}B", "--weights", "1B", "--json"
        ).json["capacity"]["rows"]  # fmt: skip
        assert rows[1]["requests"] == fit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("141G", 141 * 10**9), ("1.5 kib", 1536), ("2T", 2 * 10**12),
        (".5MB", 500_000), ("7b", 7), ("0.1GB", 100_000_000), ("3Mi", 3 * 2**20),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size("--memory", text) == size


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Qwen3.5-9"], "nearest: Qwen3.5-9B"),
        (["Nemotron-3-Nano"], "Mamba-2"),
        (["./nowhere"], "no file, no folder and no known checkpoint"),
        ([], "MODEL"),
        (["gdn", "--batch", "8,0"], "--batch 0 is below 1"),
        (["gdn", "--batch", "x"], "'x' is not a whole number"),
        (["gdn", "--ring-len", "65"], "65 is outside"),
        (["gdn", "--state-dtype", "int8"], "'int8'"),
        (["gdn", "--io-dtype", "fp8"], "--io-dtype has dtype fp8"),
        (["gdn", "--kv-dtype", "int4"], "--kv-dtype has dtype int4"),
        (["gdn", "--context", "-1"], "--context -1 is below 0"),
        (["gdn", "--spec", "0"], "--spec 0 is below 1"),
        (["gdn", "--spec", "x"], "invalid int value: 'x'"),
        (["gdn", "--spec", "63"], "--spec 63 is more than a step can verify; use 1…62"),
        (
            ["gdn", "--spec", "4", "--spec-state", "undo"],
            "--spec-state 'undo' is unknown; use one or more of ring, snap",
        ),
        (["gdn", "--spec-state", "ring"], "--spec-state ring has no effect without --spec"),
        (["gdn", "--reserve", "1GB"], "--reserve 1GB has no effect without --memory"),
        (["gdn", "--spec", "9", "--ring-len", "10"], "use --ring-len 11 or more, or --spec up to 8"),
        (["gdn", "--tp", "0"], "--tp 0 is below 1"),
        (["gdn", "--tp", "3"], "--tp 3 does not divide 2 key heads and 4 value heads"),
        (["gdn", "--memory", "80"], "'80' is not a size with a unit"),
        (["gdn", "--memory=-1GB"], "not a size with a unit"),
        (["gdn", "--memory", "0GB"], "less than a byte"),
        (["gdn", "--weights", "much"], "--weights 'much'"),
        (["gdn", "--reserve", "1 apple"], "--reserve '1 apple'"),
        (["Qwen3.5-27B", "--memory", "24GiB"], "memory of 24 GiB does not hold weights of 50.1 GiB"),
        (["gdn", "--memory", "20MiB", "--reserve", "10MiB"], "kept free"),
        (["gdn", "--plot", "x.gif"], ".svg"),
        (["gdn", "--plot", "nowhere/x.png"], "there is no folder nowhere"),
    ],
)
def test_bad_input(refused, words, said):
    assert said in refused("plan", *words)


def test_configs_that_cannot_be_planned(refused, tmp_path):
    file = tmp_path / "config.json"
    for config, said in (
        ('{"model_type": "llama"}', "no linear-attention layers"),
        ('{"model_type": "bamba"}', "Mamba-2"),
        ("{", "is not JSON"),
    ):
        file.write_text(config)
        assert said in refused("plan", file)
        assert said in refused("plan", tmp_path)
    file.unlink()
    assert "has no config.json" in refused("plan", tmp_path)


def test_plot(cli, tmp_path):
    pytest.importorskip("matplotlib")
    result = cli("plan", "Qwen3.5-4B", "--batch", "64", "--plot", tmp_path / "out.svg")
    assert result.code == 0, result
    text = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert "plot: " in result.err
    assert cli("plan", "gdn", "--plot", tmp_path / "out.png").code == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_it_imports_no_torch_and_is_instant():
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys, time; start = time.process_time()\n"
        "from replayssm.cli import main; code = main(['plan', 'gdn', '--memory', '1GB', '--json'])\n"
        "heavy = sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & sys.modules.keys())\n"
        "print(code, time.process_time() - start, heavy)"
    )
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
        wall = time.perf_counter() - start
        assert done.returncode == 0, done.stderr
        exit_code, spent, heavy = done.stdout.splitlines()[-1].split(maxsplit=2)
        assert (exit_code, heavy) == ("0", "[]")
        seconds.append((float(spent), wall))
    assert min(seconds)[0] < 0.5, seconds
