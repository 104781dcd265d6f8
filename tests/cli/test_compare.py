"""A first difference is a near-tie or it is not."""

import pytest
import torch

from replayssm.cli import compare as module
from replayssm.cli.compare import Verdict, compare, first_difference
from replayssm.cli.decoding import Run, encode, load
from replayssm.cli.generate_request import sampling_params
from replayssm.cli.routes import last_logits, run
from replayssm.cli.stock import draw
from replayssm.engine.options import EngineOptions


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


@pytest.fixture(scope="module")
def loaded(saved):
    return load(str(saved), "float32", "cpu")


@pytest.fixture
def judge(loaded, monkeypatch):
    """Compare two runs of given tokens whose logits at the first difference differ by `delta` in one place."""
    logits = torch.linspace(-3, 3, 257)

    def call(got, expected, delta, drawn=7):
        def last(loaded, prompt, route, options, params, steps, drafts=()):
            return logits + delta * torch.eye(257)[7] if route == "replay" else logits.clone()

        monkeypatch.setattr(module, "last_logits", last)
        monkeypatch.setattr(module, "_limit", lambda *args: 1e-3)
        monkeypatch.setattr(module, "draw", lambda *args: drawn)
        runs = [Run(tokens, "length") for tokens in (got, expected)]
        prompt, params = encode(loaded, "abc", 5), sampling_params({})
        return compare(loaded, prompt, EngineOptions(), params, ("replay", runs[0]), ("stock", runs[1]))

    return call


def test_verdicts(judge):
    assert judge([1, 2, 3], [1, 2, 3], 9.0) == Verdict("stock", "equal", 3)
    tie = judge([1, 7, 3], [1, 8, 3], 5e-4)
    assert (tie.status, tie.ok, tie.position, tie.got, tie.expected) == ("near-tie", True, 1, 7, 8)
    assert tie.delta == pytest.approx(5e-4, rel=1e-2)
    assert tie.gap == pytest.approx(-6 / 256 + 5e-4, rel=1e-2)
    assert "OK, near-tie; first difference at token 1: 'a' instead of 'b'" in tie.describe(("a", "b"))
    wrong = judge([1, 7, 3], [1, 8, 3], 0.5)
    assert (wrong.status, wrong.ok) == ("different", False)
    assert wrong.describe(("a", "b")).startswith("DIFFERENT")
    assert judge([1, 7, 3], [1, 8, 3], float("nan")).status == "different"
    undrawn = judge([1, 7, 3], [1, 8, 3], 0.0, drawn=8)
    assert undrawn.status == "different"
    assert "its own logits give token 8, not 7" in undrawn.describe()
    short = judge([1, 2], [1, 2, 3], 0.0)
    assert (short.status, short.position) == ("different", 2)
    assert "after 2 equal tokens" in short.describe()


def test_limit_is_of_the_size_of_rounding(loaded):
    prompt = encode(loaded, "abcdef", 20)
    params = sampling_params({})
    logits = last_logits(loaded, prompt, "stock", EngineOptions(), params, 3)
    tokens = [int(logits.argmax())] * 3
    assert logits.shape == (257,)
    fp32 = module._limit(loaded, prompt, EngineOptions(state_dtype="float32"), params, tokens, logits)
    bf16 = module._limit(loaded, prompt, EngineOptions(state_dtype="bfloat16"), params, tokens, logits)
    assert fp32 > 0
    assert bf16 >= 8 * 2**-7 * float(logits.abs().max())


@pytest.mark.parametrize("route", ["replay", "packed", "stock"])
@pytest.mark.parametrize(
    "given", [{}, {"temperature": 1.2, "top_k": 50, "seed": 3}, {"repetition_penalty": 2.0, "frequency_penalty": 1.0}]
)
def test_last_logits_give_the_token(loaded, route, given):
    prompt, options, params = (
        encode(loaded, "abcdef", 20),
        EngineOptions(4),
        sampling_params({**given, "max_tokens": 8}),
    )
    done = run(loaded, prompt, route, options, params)
    for at in (0, 3, 7):
        logits = last_logits(loaded, prompt, route, options, params, at)
        assert draw(logits, prompt.tokens, done.tokens[:at], params) == done.tokens[at]
