"""`replayssm bench prefix`: warm against cold, judged before anything is reported."""

from __future__ import annotations

import dataclasses
import gc
import json
import shlex
from itertools import pairwise

import pytest

from replayssm.bench import prefix_tree, serving_check
from replayssm.bench.prefix_request import TARGET_RATIO
from replayssm.cli.parser import build_parser
from replayssm.engine import setup
from replayssm.engine.core import Engine
from replayssm.engine.runner import Runner
from replayssm.state import SlotPool
from replayssm.state.prefix import PrefixCache

MODES = ["replay", "packed"]
ROW = {
    "part", "case", "mode", "state_dtype", "status", "error", "check", "requests", "prompt_tokens", "cold_ms",
    "warm_ms", "ratio", "cached_tokens", "hit_rate", "target", "met", "notes",
}  # fmt: skip
NUMBERS = ("cold_ms", "warm_ms", "ratio", "cached_tokens", "hit_rate", "target", "met", "prompt_tokens", "requests")
CASES = [("turns", "1"), ("turns", "2"), ("turns", "3"), ("shared", "first"), ("shared", "others")]
CASES += [("again", "first"), ("again", "while it runs"), ("again", "with its answer")]
SMALL = (
    "--conversations", "2", "--turns", "3", "--history", "40", "--requests", "3", "--system", "16", "--repeat", "35",
    "--prompt-tokens", "5", "--output-tokens", "4", "--interval", "8", "--page-size", "8", "--ring-len", "4",
    "--prefixes", "40", "--depth", "512", "--device", "cpu", "--dtype", "float32",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """The runs collect garbage often; what was there before them need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def bench(cli, tiny, tmp_path, monkeypatch):
    """Call; returns the result of the command, and what it wrote as JSON. Pools are small, so that engines are quick
    to make."""
    monkeypatch.setattr(setup, "CPU_BESIDES_WEIGHTS", 2**26)

    def call(*words):
        file = tmp_path / "out.json"
        result = cli("bench", "prefix", "--config", tiny, *SMALL, "--json", file, *words)
        return result, json.loads(file.read_text(encoding="utf-8"))

    return call


def rows_of(found, part, mode):
    return [row for row in found["rows"] if (row["part"], row["mode"]) == (part, mode)]


def test_all_parts(bench):
    result, found = bench()
    assert result.code == 0, result
    assert found["ok"] is True
    assert [(r["part"], r["case"], r["mode"]) for r in found["rows"]] == [(*c, mode) for c in CASES for mode in MODES]
    for row in found["rows"]:
        assert row.keys() == ROW
        assert (row["status"], row["check"]["cold"]["status"], row["check"]["warm"]["status"]) == (
            "ok",
            "equal",
            "equal",
        )
        assert row["ratio"] == row["warm_ms"]["median"] / row["cold_ms"]["median"]
        assert len(row["cached_tokens"]) == row["requests"]
        assert row["hit_rate"] == sum(row["cached_tokens"]) / row["requests"] / row["prompt_tokens"]
    for mode in MODES:
        turns, shared, again = (rows_of(found, part, mode) for part in ("turns", "shared", "again"))
        assert [row["prompt_tokens"] for row in turns] == [40, 49, 58]
        # all of the turn before but its last token, which was never computed
        assert [row["cached_tokens"] for row in turns] == [[0, 0], [43, 43], [52, 52]]
        assert [row["target"] for row in turns] == [None, TARGET_RATIO, None]
        assert turns[1]["met"] == (turns[1]["ratio"] <= TARGET_RATIO)
        assert [row["cached_tokens"] for row in shared] == [[0], [16, 16]]
        assert [(row["cached_tokens"], row["target"], row["met"]) for row in again] == [
            ([0], None, None), ([32], 32, True), ([38], 38, True),
        ]  # fmt: skip
    assert [(one["part"], one["mode"]) for one in found["caches"]] == [
        (p, m) for p in ("turns", "shared", "again") for m in MODES
    ]
    for one in found["caches"]:
        mine = rows_of(found, one["part"], one["mode"])
        hit = sum(sum(row["cached_tokens"]) for row in mine)
        assert one["hit_tokens"] == {"kv": hit, "state": hit, "usable": hit}
        assert one["asked"] == sum(row["prompt_tokens"] * row["requests"] for row in mine)
        assert one["snapshots"] == one["kept"]["states"] + one["evicted"]["states"]
        assert min(*one["kept"].values(), *one["bytes"].values()) > 0
        assert one["bytes"]["pages"] % one["kept"]["pages"] == 0
    assert [(one["part"], one["mode"], one["equal"]) for one in found["reuse"]] == [
        (part, "replay", True) for part in ("turns", "shared", "again")
    ]
    assert [(one["page_size"], one["status"], one["prefixes"]) for one in found["tree"]] == [
        (16, "ok", 40),
        (64, "ok", 40),
    ]
    assert [plan["mode"] for plan in found["plans"]] == ["packed", "replay"]
    assert {"torch", "transformers"} <= found["versions"].keys()
    assert found["device"]["type"] == "cpu"
    assert "random weights" in found["weights"]
    assert "reused in again, state float32: 70 tokens in mode replay, 70 packed: equal" in result.out
    assert result.out.count(" equal\n") >= len(found["rows"])


def test_a_later_turn_is_all_that_was_said_and_something_new(bench, monkeypatch):
    """Both engines and both modes read the same prompts."""
    seen, make = [], Engine.make
    monkeypatch.setattr(Engine, "make", lambda *args: (seen.append(make(*args)), seen[-1])[1])
    _, found = bench("--parts", "turns", "--conversations", "1")
    assert found["ok"] is True
    runs = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert len(runs) == 8, "four engines, a first run and one that is timed"
    for run in runs:
        assert [one.prompt for one in run] == [one.prompt for one in runs[0]]
        for before, after in pairwise(run):
            text = before.prompt + before.output
            assert after.prompt[: len(text)] == text
            assert len(after.prompt) == len(text) + 5


def test_a_prompt_comes_again_while_its_first_request_runs(bench, monkeypatch):
    """And the third time when both have ended."""
    seen, submit = [], Engine.submit

    def watched(engine, *args):
        seen.append([(len(one.output), one.cached_tokens) for one in engine.scheduler.running])
        submit(engine, *args)

    monkeypatch.setattr(Engine, "submit", watched)
    _, found = bench("--parts", "again")
    assert found["ok"] is True
    assert seen == [[]] * 3 + [[], [(1, 0)], []] * 7, "what is written for the check, then seven runs"


def test_pages_without_a_state_are_no_hit(bench):
    """Tails longer than the interval: no state lies where the requests part."""
    _, found = bench("--parts", "shared", "--prompt-tokens", "20")
    assert found["ok"] is True
    for one in found["caches"]:
        assert one["hit_tokens"] == {"kv": 32, "state": 0, "usable": 0}


@pytest.mark.parametrize("how", ["no state", "crash"])
def test_a_cache_that_gives_back_something_else_has_no_number(bench, monkeypatch, how):
    real = PrefixCache.adopt

    def adopt(cache, match, locked, slot):
        if how == "crash" and match.depth:
            raise RuntimeError("out of pages")
        pages = real(cache, match, locked, slot)
        cache.slots.state[:, slot] = 0
        return pages

    monkeypatch.setattr(PrefixCache, "adopt", adopt)
    result, found = bench("--parts", "turns,shared")
    assert (result.code, found["ok"]) == (1, False)
    for row in found["rows"]:
        fresh = how == "no state" and row["case"] in ("1", "first")
        assert row["status"] == ("ok" if fresh else "failed"), row
        if not fresh:
            assert {row[name] for name in NUMBERS} == {None}
            said = "out of pages" if how == "crash" else "warm against packed decode without a cache: "
            assert said in row["error"]
    assert [(one["reused_on"], one["reused_off"], one["equal"]) for one in found["reuse"]] == [(None, None, None)] * 2
    assert "FAILED turns 2, mode replay, state float32: " in result.out


def test_packed_decode_that_is_wrong_takes_all_with_it(bench, monkeypatch):
    monkeypatch.setattr(serving_check, "MOST_NOISE", -1.0)
    result, found = bench("--parts", "again")
    assert result.code == 1
    errors = {row["mode"]: row["error"] for row in found["rows"]}
    assert "a forward over the whole text differ by" in errors["packed"]
    assert "did not pass its own check" in errors["replay"]


@pytest.mark.parametrize(("state", "passes"), [("float32", False), ("bfloat16", True)])
def test_a_near_tie_passes_where_states_have_16_bits(bench, monkeypatch, state, passes):
    real = serving_check.judge

    def judge(said, reference):
        found = real(said, reference)
        return dataclasses.replace(found, status="near-tie", ok=True, request=0, position=2, gap=0.5)

    monkeypatch.setattr(serving_check, "judge", judge)
    result, found = bench("--parts", "shared", "--state-dtype", state)
    assert result.code == (0 if passes else 1)
    assert {row["status"] for row in found["rows"]} == {"ok" if passes else "failed"}
    assert ("near-tie shared first, mode replay, state bfloat16, cold: request 0 differs" in result.out) == passes


def test_replay_that_reuses_less_is_said(bench, monkeypatch):
    real = PrefixCache.insert

    def insert(cache, *args):
        return cache.slots.ring_len is None and real(cache, *args)

    monkeypatch.setattr(PrefixCache, "insert", insert)
    result, found = bench("--parts", "again")
    assert result.code == 0, "what is not reused is no wrong token"
    assert found["reuse"] == [
        dict(part="again", mode="replay", state_dtype="float32", reused_on=0, reused_off=70, equal=False)
    ]
    assert "0 tokens in mode replay, 70 packed: NOT equal" in result.out
    assert [row["met"] for row in rows_of(found, "again", "replay")] == [None, False, False]
    assert "≥ 32 MISSED" in result.out


def test_what_is_left_at_the_last_fold(bench):
    _, found = bench("--parts", "again", "--prefix-policy", "truncate", "--prefix-strategy", "extra_buffer")
    for mode, least in (("replay", 35), ("packed", 38)):
        (row,) = (row for row in rows_of(found, "again", mode) if row["case"] == "with its answer")
        assert (row["target"], row["met"]) == (least, True)


def test_the_tree_alone_needs_no_model(bench, monkeypatch):
    monkeypatch.setattr(SlotPool, "__init__", lambda *args: pytest.fail("a pool was made"))
    result, found = bench("--parts", "tree")
    assert result.code == 0, result
    assert (found["name"], found["rows"], found["caches"]) == (None, [], [])
    assert [row["status"] for row in found["tree"]] == ["ok", "ok"]
    assert "tree of 40 prefixes of 512 tokens" in result.out


def test_a_tree_that_errs_is_a_failure(bench, monkeypatch):
    monkeypatch.setattr(prefix_tree, "_depth", lambda cache, tokens: 0)
    result, found = bench("--parts", "tree")
    assert (result.code, found["ok"]) == (1, False)
    assert "FAILED tree, pages of 16: RunError: the tree answers 0, expected 512" in result.out


def test_the_command_gives_the_same_request(bench):
    _, found = bench("--parts", "tree,tree", "--prefix-policy", "truncate", "--interval", "16", "--seed", "3")
    words = shlex.split(found["command"])
    args = build_parser().parse_args(words[1:])
    again = args.request(args)
    assert again.command == shlex.join(words)
    assert again.parts == ("tree",)
    options = again.prefix_options("replay", "float32", 256, cache=True)
    assert (options.prefix_cache, options.prefix_interval, options.prefix_policy) == (True, 16, "truncate")
    assert not again.prefix_options("replay", "float32", 256, cache=False).prefix_cache


def test_the_plot_is_written(bench, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.svg"
    result, _ = bench("--parts", "turns,again", "--mode", "replay,packed", "--plot", file)
    assert result.code == 0, result
    assert file.read_text(encoding="utf-8").startswith("<?xml")
    assert f"plot: {file}" in result.err


def test_what_an_engine_refuses_is_known_before_a_step_ran(refused, monkeypatch):
    monkeypatch.setattr(Runner, "launch", lambda *args: pytest.fail("a step ran"))
    said = refused("bench", "prefix", "gdn", "--device", "cpu", "--interval", "40")
    assert "prefix_interval 40 is not a multiple of page_size 16; the smallest that works is 48" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "turns,trees"], "--parts 'trees' is unknown; use one or more of turns, shared, again, tree"),
        (["--conversations", "0"], "--conversations 0 is below 1"),
        (["--turns", "1"], "--turns 1 is below 2"),
        (["--history", "0"], "--history 0 is below 1"),
        (["--requests", "1"], "--requests 1 is below 2"),
        (["--system", "0"], "--system 0 is below 1"),
        (["--repeat", "1"], "--repeat 1 is below 2"),
        (["--interval", "0"], "--interval 0 is below 1"),
        (["--output-tokens", "2"], "--output-tokens 2 is below 3"),
        (["--prefixes", "0"], "--prefixes 0 is below 1"),
        (["--depth", "127"], "--depth 127 is below 128"),
        (["--prefix-policy", "cut"], "invalid choice: 'cut'"),
        (["--parts", "tree", "--plot", "x.png"], "--plot shows turns, and --parts tree has none; add turns"),
        (["--history", "3800"], "part turns: --history 3800, --turns 4 with --prompt-tokens 64 and --output-tokens 32 "
         "make 4120 tokens, the model has 4096 positions"),
        (["--system", "4001"], "part shared: --system 4001, --prompt-tokens 64 and --output-tokens 32 make 4097"),
        (["--repeat", "4033"], "part again: --repeat 4033 and --output-tokens 32 make 4097 tokens, the model has 4096"),
        (["--context", "2000"], "part turns: --history 2048, --turns 4 with --prompt-tokens 64 and --output-tokens 32 "
         "make 2368 tokens, above --context 2000"),
        (["--context", "8192"], "--context 8192 exceeds the model's 4096 positions"),
    ],
)  # fmt: skip
def test_bad_input(refused, words, said):
    assert said in refused("bench", "prefix", "gdn", "--device", "cpu", *words)
