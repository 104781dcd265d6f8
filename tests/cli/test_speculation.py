"""Drafts on the command line: the same text, accounted for and checked; what cannot work is refused with what would."""

import contextlib
import io
import json
import re
import shutil

import pytest

from replayssm import ops
from replayssm.cli import decoding, main, routes
from replayssm.cli.speculation import SPEC_STATES, spec_fields
from replayssm.engine import core
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.errors import OptionError
from replayssm.shipped import SHIPPED
from tests.cli.conftest import save_model

N = 28
LOOP = ("--prompt", "the sea the sea the sea", "--max-tokens", N, "--ignore-eos")  # the shipped model goes in circles
ALWAYS = ("--no-spec-adaptive",)
SAMPLED = ("--temperature", 0.3, "--seed", 4)


@pytest.fixture(scope="module")
def plain():
    """Tokens without drafts, greedy and sampled."""
    found = []
    for words in ((), SAMPLED):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(["generate", "gdn", *map(str, (*LOOP, *words)), "--json", "--quiet", "--no-check"])
        found.append(json.loads(out.getvalue())["token_ids"])
    return found


@pytest.mark.parametrize("state", SPEC_STATES)
def test_the_text_is_that_without_drafts(cli, plain, state):
    for words, tokens in zip(((), SAMPLED), plain, strict=True):
        result = cli("generate", "gdn", *LOOP, *words, "--spec", "ngram", "--spec-state", state, *ALWAYS, "--json")
        assert result.code == 0, result
        data, other = result.json, "replay" if state == "ring" else "packed"
        assert data["route"] == "spec"
        assert data["token_ids"] == tokens
        assert list(data["check"]) == [other, "stock"]
        assert {verdict["status"] for verdict in data["check"].values()} == {"equal"}
        spec = data["spec"]
        assert (spec["drafter"], spec["tokens"], spec["state"], spec["adaptive"]) == ("ngram", 4, state, False)
        assert (spec["drafted"], spec["drafts_kept"]) == (data["drafted"], data["drafts_kept"])
        assert spec["steps"] == N - 1 - spec["drafts_kept"]
        assert spec["tokens_per_step"] == (N - 1) / spec["steps"]
        assert spec["speedup"] > 0
        if not words:
            assert 10 < spec["drafts_kept"] <= spec["drafted"]
            assert spec["acceptance"] == spec["drafts_kept"] / spec["drafted"]
        assert data["ring_len"] == (16 if state == "ring" else None)
        counted = data["traffic_bytes_per_token"]
        assert counted["spec"]["source"] == counted[other]["source"] == "counted"


def test_bytes_of_a_token_are_those_that_were_moved(cli):
    with ops.count_traffic() as traffic:
        data = cli("generate", "gdn", *LOOP, "--spec", "ngram", *ALWAYS, "--json", "--quiet", "--no-check").json
    total = traffic.totals()
    counted = data["traffic_bytes_per_token"]["spec"]
    for part in ("state_read", "state_written", "ring_read", "ring_written"):
        assert counted[part] * (N - 1) == pytest.approx(getattr(total, part))
    assert data["flushes"] == total.flushes / 6


def test_summary(cli, saved):
    result = cli("generate", "gdn", *LOOP, "--spec", "ngram", *ALWAYS)
    assert result.code == 0, result
    for pattern in (
        r"bytes per token +with drafts \(counted\) +replay \(counted\) +packed \(computed\) +ratio",
        r"drafts +\d+ drafted, \d+ kept \([\d.]+ %\), \d\.\d\d tokens a step, [\d.]+ × as fast as replay",
        rf"against replay +OK, all {N} tokens equal",
        rf"against stock transformers +OK, all {N} tokens equal",
        r"state float32 \(default\), ring of 16, model float32, greedy",
    ):
        assert re.search(pattern, result.out), pattern
    assert "ring of 16, for windows of 5 tokens (4 drafts and the newest one)" in result.err
    assert re.search(r"^windows of drafts +[\d.]+ KiB$", result.err, re.M)
    result = cli("generate", "gdn", *LOOP, "--spec", "ngram", "--ring-len", 8, "--no-check")
    assert "ring of 8, model" in result.out
    assert "for windows of" not in result.err
    assert "× as fast" not in result.out
    assert "ring of" not in cli("generate", saved, "--max-tokens", 2, "--no-check").err


def test_nothing_to_guess_is_said(cli, saved):
    result = cli("generate", saved, "--prompt", "x", "--max-tokens", 2, "--spec", "ngram", "--json")
    assert result.json["spec"]["acceptance"] is None
    assert "none in 1 steps" in result.err
    one = cli("generate", saved, "--max-tokens", 1, "--spec", "ngram", "--json").json["spec"]
    assert (one["steps"], one["tokens_per_step"], one["speedup"]) == (0, None, None)


def test_without_spec_nothing_is_drafted(cli):
    data = cli("generate", "gdn", *LOOP, "--json", "--quiet", "--no-check").json
    assert (data["spec"], data["drafted"], data["drafts_kept"], data["ring_len"]) == (None, 0, 0, 8)


def test_the_models_own_head(cli):
    words = ("generate", "gdn", "--spec", "mtp", "--spec-tokens", 2, "--max-tokens", 24, *ALWAYS, "--json", "--quiet")
    data = cli(*words).json
    assert {verdict["status"] for verdict in data["check"].values()} == {"equal"}
    assert 0 < data["drafts_kept"] < data["drafted"]


def test_the_logits_behind_every_token_can_be_had_again():
    loaded = decoding.load("gdn", "float32", "cpu")
    prompt, params = decoding.encode(loaded, LOOP[1], 20), SamplingParams(temperature=0, max_tokens=20)
    options = EngineOptions(spec="ngram", ring_len=16, mode="replay")
    run = routes.run(loaded, prompt, "spec", options, params)
    assert run.drafts_kept > 5
    for at, token in enumerate(run.tokens):
        logits = routes.last_logits(loaded, prompt, "spec", options, params, at, run.drafts)
        assert int(logits.argmax()) == token


# Mutations: the check must notice wrong drafts that are kept, and wrong states behind right ones.


def test_drafts_that_are_kept_unseen_fail_both_checks(cli, monkeypatch):
    enter = core.Engine._enter

    def wrong(self, result, now):
        tokens = result.tokens
        if result.drafts and result.drafts[0] != tokens[0]:
            tokens = [result.drafts[0], *tokens[1:]]
        return enter(self, result._replace(tokens=tokens), now)

    monkeypatch.setattr(core.Engine, "_enter", wrong)
    hot = ("--temperature", 1.0)
    result = cli("generate", "gdn", *LOOP, *hot, "--spec", "ngram", *ALWAYS, "--json")
    assert result.code == 1
    assert {name: verdict["ok"] for name, verdict in result.json["check"].items()} == {"replay": False, "stock": False}
    verdict = result.json["check"]["replay"]
    assert verdict["delta"] <= verdict["limit"]  # the logits are right, and do not give the token
    assert verdict["drawn"] == verdict["expected"] != verdict["got"]


@pytest.mark.parametrize("state", ["ring", "snapshot"])
def test_a_wrong_window_fails_both_checks(cli, monkeypatch, state):
    name = f"fused_recurrent_linear_{'replayssm' if state == 'ring' else 'packed'}_verify"
    original = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda mixed_qkv, *rest: original(mixed_qkv * 1.5, *rest))
    result = cli("generate", "gdn", *LOOP, "--spec", "ngram", "--spec-state", state, *ALWAYS, "--json")
    assert result.code == 1
    for verdict in result.json["check"].values():
        assert not verdict["ok"]
        assert verdict["delta"] > verdict["limit"]
        assert verdict["drawn"] == verdict["got"]  # its own windows, run again, say the same


# Many prompts.


def test_lines(cli, tmp_path):
    lines = [{"prompt": LOOP[1]}, {"prompt": LOOP[1], "n": 2, "temperature": 0.3, "seed": 1}, {"prompt": [1, 9999]}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    words = ("generate", "gdn", "--jsonl", tmp_path / "in", *LOOP[2:])
    before = [json.loads(line) for line in cli(*words).out.splitlines()]
    result = cli(*words, "--spec", "ngram", "--spec-tokens", 3, *ALWAYS)
    found = [json.loads(line) for line in result.out.splitlines()]
    outputs = [found[0], *found[1]["outputs"]]
    for one, other in zip(outputs, [before[0], *before[1]["outputs"]], strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert other["drafted"] == other["drafts_kept"] == 0
    assert 10 < found[0]["drafts_kept"] <= found[0]["drafted"]
    assert "drafted" not in found[2]
    drafted, kept = (sum(one[key] for one in outputs) for key in ("drafted", "drafts_kept"))
    assert f"\n{drafted} drafted, {kept} kept ({100 * kept / drafted:.1f} %)\n" in result.err
    assert "ring of 16, for windows of 4 tokens" in result.err


def test_a_line_may_not_hide_the_counts(cli, saved, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "a", "drafted": 1}')
    result = cli("generate", saved, "--jsonl", tmp_path / "in")
    assert "'drafted' is a key of the results" in json.loads(result.out)["error"]


# What is refused.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spec", "oracle"], "invalid choice: 'oracle' (choose from"),
        (["--spec", "ngram", "--spec-state", "undo"], "invalid choice: 'undo' (choose from"),
        (["--spec-tokens", 3], "--spec-tokens 3 has no effect without --spec ngram or mtp"),
        (["--spec-state", "fold"], "--spec-state fold has no effect without --spec"),
        (["--no-spec-adaptive"], "--no-spec-adaptive has no effect without --spec"),
        (["--spec", "ngram", "--spec-tokens", 0], "--spec-tokens 0 is below 1"),
        (["--spec", "ngram", "--spec-tokens", 63], "--spec-tokens 63 is more than a step can verify; use 1…62"),
        (["--spec", "ngram", "--spec-tokens", "x"], "invalid int value: 'x'"),
        (
            ["--spec", "ngram", "--ring-len", 5],
            "--spec-tokens 4 makes a window of 5 tokens, which leaves no room in a ring of 5; use --ring-len 6 or "
            "more, or --spec-tokens up to 3",
        ),
        (["--spec", "ngram", "--ring-len", 65], "65 is outside 1…64"),
        (["--spec", "ngram", "--spec-state", "fold", "--ring-len", 9], "has no effect with --spec-state fold"),
        (["--spec", "ngram", "--no-replay"], "use one of snapshot, kv-replay, fold"),
    ],
)  # fmt: skip
def test_bad_options(refused, saved, words, said):
    assert said in refused("generate", saved, *words)


def test_models_without_a_head_are_refused_before_they_are_loaded(refused, copy, tmp_path, monkeypatch):
    monkeypatch.setattr("replayssm.cli.decoding.load_model", None)
    remedy = "mtp works with qwen3_5 checkpoints that have it, as the shipped gdn; ngram works with all"
    (tmp_path / "in").write_text('{"prompt": "a"}')
    for command in (["generate"], ["generate", "--jsonl", tmp_path / "in"], ["serve", "--port", 0]):
        line = refused(command[0], copy, "--spec", "mtp", *command[1:])
        assert "has no tensors named mtp.* in model.safetensors, its shards or mtp.safetensors" in line
        assert remedy in line
        line = refused(command[0], "kda", "--spec", "mtp", *command[1:])
        assert "kda: model type 'kimi_linear' has no MTP head known here" in line
        assert remedy in line


def test_a_head_of_another_model_is_refused(refused, copy):
    shutil.copy(SHIPPED["gdn"] / "mtp.safetensors", copy)
    assert "does not fit the config" in refused("generate", copy, "--spec", "mtp")


def test_no_replay_goes_with_strategies_that_need_no_ring(cli, tmp_path):
    folder = save_model(tmp_path / "kda", "bailing_hybrid")
    words = ("generate", folder, *LOOP, "--spec", "ngram", "--spec-state", "kv-replay", "--no-replay", "--json")
    data = cli(*words).json
    assert all(verdict["ok"] for verdict in data["check"].values())
    assert list(data["check"]) == ["packed", "stock"]


def test_a_ring_is_chosen_only_where_none_is_given():
    for given, ring_len, want in (
        ({"spec": "ngram"}, None, 16), ({"spec": "ngram", "spec_tokens": 1}, None, 8),
        ({"spec": "ngram", "spec_tokens": 20}, None, 64), ({"spec": "ngram"}, 6, 6),
        ({"spec": "ngram", "spec_state": "fold", "spec_tokens": 20}, None, 8), ({}, None, 8), ({}, 3, 3),
    ):  # fmt: skip
        assert EngineOptions(**spec_fields(given, ring_len)).ring_len == want
    with pytest.raises(OptionError, match="use ring_len 6 or more"):
        EngineOptions(**spec_fields({"spec": "ngram"}, 5))
