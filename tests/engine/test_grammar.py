"""Outputs that follow a grammar: always, in any company, through preemption; bad grammars are refused when made."""

from __future__ import annotations

import functools
import json
import math
import re

import pytest

from replayssm.engine.core import Engine
from replayssm.engine.grammar import MOST_TEXT, Grammar
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.errors import GrammarError, OptionError
from replayssm.models.loading import load_model
from tests.engine.common import assert_idle, engine_of, run, with_pages

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@functools.cache
def loaded():
    return load_model("gdn", device="cpu")


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def engine(request):
    options = EngineOptions(max_requests=6, memory=2**30, context=512, overlap=request.param, mode="replay")
    made = Engine(loaded(), options)
    yield made
    made.close()


def params(grammar: Grammar | None, seed: int = 1, **change) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 120, "grammar": grammar, **change})


def text_of(request) -> str:
    return request.stream.text


def test_every_kind_is_followed_beside_free_outputs(engine):
    free = engine.add("It was a", params(None, 3, max_tokens=40, ignore_eos=True))
    regex = engine.add("The date is", params(Grammar("regex", "[0-9]{4}-(0[1-9]|1[0-2])")))
    schema = engine.add("Answer:", params(Grammar("json_schema", json.dumps(SCHEMA)), 2))
    rules = engine.add("Say", params(Grammar("ebnf", 'root ::= ("yes" | "no") " " [A-Z]+ "!"'), 4))
    greedy = engine.add("The date is", params(Grammar("regex", "[0-9]{4}-(0[1-9]|1[0-2])"), temperature=0))
    run(engine)
    assert {r.error for r in (free, regex, schema, rules, greedy)} == {None}
    for one in (regex, greedy):
        assert re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", text_of(one))
        assert one.reason == "stop"
    found = json.loads(text_of(schema))
    assert set(found) == {"name", "age", "tags"}
    assert 0 <= found["age"] <= 99
    if rules.reason == "stop":
        assert re.fullmatch(r"(yes|no) [A-Z]+!", text_of(rules))
    assert_idle(engine)
    alone = engine.add("It was a", params(None, 3, max_tokens=40, ignore_eos=True))
    run(engine)
    assert alone.output == free.output, "a grammar in the company changed a free row"


def test_without_an_end_token_the_grammar_ends_the_output(engine):
    one = engine.add("It was", params(Grammar("regex", "[a-z]{5}"), ignore_eos=True))
    run(engine)
    assert re.fullmatch("[a-z]{5}", text_of(one))
    assert one.reason == "stop"


def test_outputs_of_one_prompt_each_follow_it(engine):
    heard = {}
    engine.add(
        "Colour:",
        params(Grammar("regex", "(red|green|blue)( [0-9]{2}){2}"), n=4),
        lambda r, _: heard.update({r.index: r}),
    )
    run(engine)
    assert sorted(heard) == [0, 1, 2, 3]
    texts = [text_of(r) for r in heard.values()]
    assert all(re.fullmatch(r"(red|green|blue)( [0-9]{2}){2}", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("preempt", ["offload", "recompute"])
def test_preemption_keeps_the_place(preempt):
    with with_pages(6):
        engine = Engine(
            loaded(), EngineOptions(max_requests=3, page_size=16, context=128, memory=2**30, preempt=preempt)
        )
    grammar = Grammar("regex", "([a-z]{3} ){24}")
    made = [engine.add("Once upon a time there was", params(grammar, seed, max_tokens=60)) for seed in range(3)]
    run(engine)
    assert engine.stats.preemptions > 0
    for one in made:
        assert re.fullmatch(r"([a-z]{3} )*[a-z]{0,3}", text_of(one)), (one.reason, one.error)
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "[", "regex grammar cannot be used"),
        ("regex", "a\ud800", "cannot be used"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", "false", "cannot be used"),
        ("json_schema", "[" * 100_000, "exceeds"),
        ("json_schema", "[" * 5000 + "]" * 5000, "nested deeper|not JSON"),
        ("json_schema", '{"items":' * 70 + "{}" + "}" * 70, "nested deeper than 64"),
        ("ebnf", "root ::= root", "allows no text"),
        ("ebnf", 'start ::= "a"', "root"),
        ("structural_tag", '{"type": "structural_tag"}', "cannot be used"),
        ("regex", "a" * (MOST_TEXT + 1), f"{MOST_TEXT + 1} characters exceeds {MOST_TEXT}"),
    ],
)
def test_bad_grammars_are_refused(engine, kind, text, said):
    with pytest.raises(GrammarError, match=said):
        engine.make("x", params(Grammar(kind, text)))
    assert_idle(engine)


def test_a_grammar_that_logit_bias_rules_out_fails_alone(engine):
    other = engine.add("It was", params(None, max_tokens=20, ignore_eos=True))
    token = engine.tokenizer.encode("a")[0]
    bad = engine.add("x", params(Grammar("regex", "a"), logit_bias={token: -math.inf}))
    run(engine)
    assert bad.reason == "error"
    assert "no token is left" in bad.error
    assert other.reason == "length"
    assert len(other.output) == 20
    assert_idle(engine)


def test_a_matcher_that_breaks_fails_alone(engine, monkeypatch):
    other = engine.add("It was", params(None, max_tokens=12, ignore_eos=True))
    bad = engine.add("x", params(Grammar("regex", "[a-z]{40}")))
    engine.step()

    class Broken:
        def fill_next_token_bitmask(self, *_):
            raise RuntimeError("broken")

        def accept_token(self, _):
            return True

        def is_terminated(self):
            return False

    bad.matcher._matcher = Broken()
    run(engine)
    assert (bad.reason, other.reason) == ("error", "length")
    assert "broken" in bad.error
    assert_idle(engine)


def test_parameters_that_contradict_a_grammar():
    with pytest.raises(OptionError, match="min_tokens 3 contradicts"):
        SamplingParams(min_tokens=3, grammar=Grammar("json"))
    with pytest.raises(OptionError, match="no Grammar"):
        SamplingParams(grammar="[a-z]")
    with pytest.raises(GrammarError, match="unknown"):
        Grammar("yaml")


def test_a_model_without_a_tokenizer_refuses():
    with engine_of() as engine, pytest.raises(OptionError, match="needs a tokenizer"):
        engine.make([1, 2], params(Grammar("json")))
