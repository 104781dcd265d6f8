"""What rows of the prefix benchmark say of given answers, and the tree alone."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from types import SimpleNamespace

import pytest

from replayssm.bench import prefix, prefix_rows, prefix_tree, workload
from replayssm.bench.prefix_request import TARGET_RATIO
from replayssm.bench.prefix_rows import Said, Script, Trial
from replayssm.bench.serving_check import Reference, Transcript
from replayssm.cli.parser import build_parser
from replayssm.engine.request import Logprob
from replayssm.state.prefix import PrefixCache

VOCABULARY = 50


def request_of(*words):
    args = build_parser().parse_args(["bench", "prefix", "gdn", *words])
    return args.request(args)


def transcript(length, token):
    return Transcript([1] * length, [Logprob(token, -1.0, ((token, -1.0), (token + 1, -1.5)))])


def trial_of(part, lengths, cold, warm, cached, mode="replay"):
    """Seconds to first tokens, and tokens from the cache; every answer is that of the reference."""
    answers = [transcript(length, 7) for length in lengths]
    found = Trial(part, mode, "float32")
    found.cold = [Said(one, seconds, 0) for one, seconds in zip(answers, cold, strict=True)]
    found.warm = [Said(*three) for three in zip(answers, warm, cached, strict=True)]
    return found, {part: Script([], Reference(answers, 1e-6, 1e-6, 1.0, 1e-7))}


@pytest.mark.parametrize(("warm", "met"), [(0.25, True), (0.26, False)])
def test_the_second_turn_against_its_target(warm, met):
    request = request_of("--conversations", "3", "--turns", "2")
    trial, scripts = trial_of("turns", [10] * 3 + [20] * 3, [1.0] * 6, [1, 1, 1, warm, 9, 0.1], [0] * 3 + [19, 19, 4])
    first, second = prefix_rows.rows(request, trial, scripts)
    assert (first["case"], first["requests"], first["target"], first["met"]) == ("1", 3, None, None)
    assert (second["ratio"], second["target"], second["met"]) == (warm, TARGET_RATIO, met)
    assert second["warm_ms"] == pytest.approx(
        {"mean": 1e3 * (warm + 9.1) / 3, "median": 1e3 * warm, "p99": 9e3}, rel=0.02
    )
    assert second["hit_rate"] == 42 / 60


@pytest.mark.parametrize(
    ("words", "cached", "met"),
    [
        ((), [0, 960, 1031], [None, True, True]),
        ((), [0, 959, 1030], [None, False, False]),
        (("--interval", "128"), [0, 896, 1031], [None, True, True]),
        (("--prefix-policy", "truncate"), [0, 960, 1024], [None, True, True]),
        (("--prefix-policy", "truncate"), [0, 960, 1023], [None, True, False]),
        (("--prefix-policy", "truncate", "--ring-len", "16"), [0, 960, 1016], [None, True, True]),
    ],
)
def test_a_prompt_that_comes_again_against_its_targets(words, cached, met):
    trial, scripts = trial_of("again", [1000, 1000, 1032], [1.0] * 3, [1.0] * 3, cached)
    assert [row["met"] for row in prefix_rows.rows(request_of(*words), trial, scripts)] == met


def test_packed_decode_has_no_fold_to_wait_for():
    trial, scripts = trial_of("again", [1000, 1000, 1032], [1.0] * 3, [1.0] * 3, [0, 960, 1030], mode="packed")
    rows = prefix_rows.rows(request_of("--prefix-policy", "truncate"), trial, scripts)
    assert [(row["target"], row["met"]) for row in rows] == [(None, None), (960, True), (1031, False)]


@pytest.mark.parametrize("which", ["cold", "warm"])
def test_one_other_token_and_the_row_has_no_number(which):
    trial, scripts = trial_of("shared", [30, 30, 30], [1.0] * 3, [0.5] * 3, [0, 20, 20])
    getattr(trial, which)[2] = Said(transcript(30, 8), 0.5, 20)
    first, others = prefix_rows.rows(request_of(), trial, scripts)
    assert (first["status"], others["status"]) == ("ok", "failed")
    assert others["error"].startswith(f"{which} against packed decode without a cache: first difference in request 1")
    assert others["check"][which]["status"] == "different"
    for name in ("cold_ms", "warm_ms", "ratio", "cached_tokens", "hit_rate", "met"):
        assert others[name] is None


def test_a_near_tie_is_none_in_fp32():
    """The other token is as likely as the reference's own, up to its noise."""
    trial, scripts = trial_of("shared", [30, 30], [1.0] * 2, [0.5] * 2, [0, 20])
    tied = Transcript([1] * 30, [Logprob(7, -1.0, ((7, -1.0), (8, -1.0)))])
    scripts["shared"].reference.transcripts[1] = tied
    trial.warm[1] = Said(Transcript(tied.prompt, [Logprob(8, -1.0, ((8, -1.0), (7, -1.0)))]), 0.5, 20)
    for dtype, status in (("float32", "failed"), ("bfloat16", "ok")):
        (_, others) = prefix_rows.rows(request_of("--dtype", dtype), trial, scripts)
        assert (others["status"], others["check"]["warm"]["status"]) == (status, "near-tie")


def test_time_runs_from_arrival_to_the_first_token():
    request = SimpleNamespace(prompt=[1], logprobs=[], arrived=2.0, first_token=2.25, cached_tokens=3)
    assert prefix._said(request) == (Transcript([1], []), 0.25, 3)


@pytest.mark.parametrize("failed", [None, "replay", "packed"])
def test_tokens_that_were_reused_with_replay_and_without(failed):
    rows = []
    for mode, cached in (("replay", [4, 6]), ("auto", [4, 5]), ("packed", [4, 6])):
        for part in ("shared", "turns"):
            bad = (mode, part) == (failed, "turns")
            row = dict(part=part, mode=mode, state_dtype="float32", status="failed" if bad else "ok")
            rows += [row | dict(cached_tokens=None if bad else cached), row | dict(status="ok", cached_tokens=[1])]
    found = {
        (one["part"], one["mode"]): (one["reused_on"], one["reused_off"], one["equal"])
        for one in prefix_rows.reuse(rows)
    }
    on, off = (None if failed == mode else 11 for mode in ("replay", "packed"))
    assert found == {
        ("shared", "replay"): (11, 11, True),
        ("shared", "auto"): (10, 11, False),
        ("turns", "replay"): (on, off, None if failed else True),
        ("turns", "auto"): (10, off, None if failed == "packed" else False),
    }


def asked(part, answer, *words):
    """Prompts of a part to which everybody answers the same."""
    asking, found = prefix.ASKING[part](request_of(*words).args, VOCABULARY), []
    text = next(asking)
    while text is not None:
        found.append(text)
        try:
            text = asking.send(answer)
        except StopIteration:
            text = None
    return found


def test_prompts_of_each_part():
    words = ("--conversations", "2", "--turns", "3", "--history", "9", "--prompt-tokens", "4")
    turns = asked("turns", [77, 78], *words)
    assert [len(text) for text in turns] == [9, 9, 15, 15, 21, 21]
    for chat in (turns[::2], turns[1::2]):
        for before, after in pairwise(chat):
            assert after[: len(before) + 2] == [*before, 77, 78]
    assert len({tuple(text[-4:]) for text in turns}) == 6
    shared = asked("shared", [77], "--requests", "5", "--system", "8", "--prompt-tokens", "4")
    assert {len(text) for text in shared} == {12}
    assert (len({tuple(text[:8]) for text in shared}), len({tuple(text) for text in shared})) == (1, 5)
    again = asked("again", [77, 78], "--repeat", "10")
    assert (len(again[0]), again[1], again[2]) == (10, again[0], [*again[0], 77, 78])


def test_rows_cover_every_request_once():
    request = request_of("--conversations", "2", "--turns", "3", "--requests", "5")
    for part, count in (("turns", 6), ("shared", 5), ("again", 3)):
        covered = [i for _, where in prefix_rows.cases(request, part) for i in range(count)[where]]
        assert covered == list(range(count))


def test_a_first_request_must_not_end_before_its_prompt_comes_again(monkeypatch):
    done = SimpleNamespace(finished=True)
    monkeypatch.setattr(workload, "submit", lambda *args: [done])
    monkeypatch.setattr(workload, "ramp", lambda *args: [])
    monkeypatch.setattr(workload, "synchronize", lambda *args: None)
    with pytest.raises(workload.RunError, match="ended before its prompt came again"):
        prefix._play(SimpleNamespace(), "again", [[1], [1], [1, 2]], 3)


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_tree_holds_what_was_put_in(page_size):
    forest = prefix_tree.Forest(60, 200, 64, page_size, 0)
    depth = 200 // page_size * page_size
    assert (forest.depth, len(forest.trunks), len(forest.fresh), len(forest.kept)) == (depth, 7, 7, 60)
    assert len({tokens.tobytes() for tokens in forest.kept}) == 60
    assert {len(tokens) for tokens in forest.kept} == {depth}
    assert {forest.cache.match(tokens).depth for tokens in forest.kept} == {depth}
    assert forest.cache.stats.snapshots == 67
    assert forest.cache.cached_pages == (7 * (depth - 64) + 60 * 64) // page_size
    forest.cache.check()


@pytest.mark.parametrize(("limit", "met"), [(0.0, False), (float("inf"), True)])
def test_times_of_the_tree_against_their_target(monkeypatch, limit, met):
    monkeypatch.setattr(prefix_tree, "TARGET_US", limit)
    (row, _) = prefix_tree.run(
        request_of("--prefixes", "60", "--depth", "200"), lambda text: pytest.MonkeyPatch.context()
    )
    assert (row["status"], row["error"], row["met"], row["target_us"]) == ("ok", None, met, limit)
    assert row["places"] == 7 * (192 - 64) // 16 + 60 * 4
    for name in prefix_tree.TIMES:
        assert 0 < row[name]["median"] <= row[name]["p99"]


@pytest.mark.parametrize(("slow", "met"), [(0, False), (1, False), (2, True), (3, True)])
def test_only_look_ups_and_entries_have_a_target(monkeypatch, slow, met):
    times = iter([1e9 if i == slow else 1.0 for i in range(len(prefix_tree.TIMES))])
    monkeypatch.setattr(prefix_tree, "_us", lambda seconds: {"mean": next(times)})
    assert prefix_tree.measure(100, 256, 64, 64, 0)["met"] is met


@pytest.mark.parametrize("wrong", ["forgets", "invents", "refuses", "keeps"])
def test_a_tree_that_is_wrong_has_no_times(monkeypatch, wrong):
    real = PrefixCache.match
    if wrong == "forgets":
        monkeypatch.setattr(PrefixCache, "match", lambda self, tokens: real(self, tokens[:-64]))
    elif wrong == "invents":  # the end of a prefix that differs is taken for the same
        known = {}

        def match(self, tokens):
            return known.setdefault(tokens[:64].tobytes(), real(self, tokens))

        monkeypatch.setattr(PrefixCache, "match", match)
    elif wrong == "refuses":
        monkeypatch.setattr(PrefixCache, "insert", lambda *args: False)
    else:
        monkeypatch.setattr(PrefixCache, "evict_pages", lambda self, wanted: 0)
    rows = prefix_tree.run(request_of("--prefixes", "60", "--depth", "200"), lambda text: pytest.MonkeyPatch.context())
    assert {row["status"] for row in rows} == {"failed"}
    for row in rows:
        assert row["error"].startswith("RunError: the tree answers ")
        assert {row[name] for name in (*prefix_tree.TIMES, "met")} == {None}


def test_books_are_like_those_of_a_pool():
    books = prefix_tree.Books(3)
    taken = books.allocate(2)
    assert (len(set(taken)), books.used_slots) == (2, 2)
    assert (books.can_allocate(1), books.can_allocate(2)) == (True, False)
    books.free(taken[:1])
    assert (books.used_slots, books.can_allocate(2)) == (1, True)


def test_a_look_up_in_the_forest_is_one_of_tokens_as_the_engine_has_them():
    """`match` copies what is no array; the engine's texts are arrays, so those of the tree must be."""
    forest = prefix_tree.Forest(4, 128, 64, 16, 0)
    assert all(isinstance(tokens, array) and tokens.typecode == "i" for tokens in forest.kept)
    assert random.Random(0).choices(range(prefix_tree.VOCABULARY), k=64) == list(forest.trunks[0][0])
