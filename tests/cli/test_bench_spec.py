"""`replayssm bench spec`: strategies at a set acceptance, judged before they are timed."""

import json
import shlex

import pytest

from replayssm import ops
from replayssm.cli.parser import build_parser

STRATEGIES = ["none", "ring", "snapshot", "kv-replay", "fold"]
ROW = {
    "batch", "strategy", "state_dtype", "status", "error", "check", "tokens_per_s", "step_ms", "tokens_per_step",
    "steps", "vs_none", "memory_bytes", "reserved_bytes", "slots", "mode", "notes",
}  # fmt: skip


@pytest.fixture
def bench(cli, tiny):
    def call(*words):
        small = ("--dtype", "float32", "--prompt-tokens", "7", "--steps", "6", "--device", "cpu", "--spec-tokens", "3")
        return cli("bench", "spec", "--config", tiny, *small, *words)

    return call


@pytest.mark.parametrize(("acceptance", "kept"), [("1", 4), ("0", 1)])
def test_every_strategy_keeps_what_was_asked_for(bench, tmp_path, acceptance, kept):
    file = tmp_path / "out.json"
    result = bench("--batch", "1,3", "--acceptance", acceptance, "--json", file)
    assert result.code == 0, result
    found = json.loads(file.read_text())
    assert found["ok"] is True
    assert [(row["batch"], row["strategy"]) for row in found["rows"]] == [(b, s) for b in (1, 3) for s in STRATEGIES]
    for row in found["rows"]:
        assert set(row) == ROW
        assert (row["status"], row["check"]["status"]) == ("ok", "equal")
        assert row["tokens_per_step"] == (1 if row["strategy"] == "none" else kept)
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] * row["tokens_per_step"] / row["step_ms"])
        plain = next(r for r in found["rows"] if (r["batch"], r["strategy"]) == (row["batch"], "none"))
        assert row["vs_none"] == pytest.approx(row["tokens_per_s"] / plain["tokens_per_s"])
    slots = {row["strategy"]: row["slots"] for row in found["rows"]}
    assert set(slots.values()) == {3}
    assert found["acceptance"] == float(acceptance)


def test_between_the_extremes_a_part_is_kept(bench):
    result = bench("--batch", "8", "--acceptance", "0.5", "--spec-state", "ring", "--json", "-", "--steps", "40")
    row = json.loads(result.out[result.out.index("{") :])["rows"][1]
    mean, tokens = sum(0.5**i for i in range(4)), 8 * 40
    assert abs(row["tokens_per_step"] - mean) < 5 * (1.2 / tokens) ** 0.5  # 1.2: above the variance of what is kept


def test_a_strategy_that_errs_has_no_time(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "commit_snapshot", lambda *args: None)
    file = tmp_path / "out.json"
    result = bench("--batch", "2", "--spec-state", "snapshot,fold", "--json", file)
    assert result.code == 1
    rows = {row["strategy"]: row for row in json.loads(file.read_text())["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {"none": "ok", "snapshot": "failed", "fold": "ok"}
    assert rows["snapshot"]["tokens_per_s"] is None
    assert rows["snapshot"]["error"]
    assert "FAILED snapshot" in result.out


def test_the_command_gives_the_same_request(bench, tmp_path):
    file = tmp_path / "out.json"
    assert bench("--batch", "1", "--spec-state", "fold", "--json", file, "--acceptance", "0.25").code == 0
    words = shlex.split(json.loads(file.read_text())["command"])
    args = build_parser().parse_args(words[1:])
    again = args.request(args)
    assert again.command == shlex.join(words)
    assert again.strategies == ("none", "fold")
    assert (again.args.acceptance, again.args.spec_tokens, again.args.ring_len) == (0.25, 3, 16)


def test_the_plot_is_written(bench, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.png"
    assert bench("--batch", "1,2", "--spec-state", "ring", "--plot", file).code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--acceptance", "1.5"], "--acceptance 1.5 is no chance; use 0…1"),
        (["--spec-state", "ring,tape"], "--spec-state 'tape' is unknown; use one or more of ring, snapshot"),
        (["--spec-tokens", "0"], "--spec-tokens 0 is below 1"),
        (["--spec-tokens", "15"], "a window of 16 tokens, which leaves no room in a ring of 16"),
        (["--ring-len", "4", "--spec-tokens", "4"], "use ring_len 6 or more, or spec_tokens up to 2"),
        (["--batch", "0"], "--batch"),
        (["--steps", "0"], "--steps 0 is below 1"),
    ],
)
def test_bad_input_is_refused(cli, words, said):
    result = cli("bench", "spec", "gdn", *words)
    assert result.code == 2
    assert said in result.err
