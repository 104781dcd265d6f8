"""A first difference is a near-tie or it is not."""

import pytest
import torch

from replayssm.cli import compare as module
from replayssm.cli.compare import Verdict, compare, first_difference
from replayssm.cli.decoding import Run, encode, load
from replayssm.cli.options import Decode, Sampling


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

    def call(got, expected, delta):
        def last(loaded, prompt, route, decode, sampling, steps):
            return logits + delta * torch.eye(257)[7] if route == "replay" else logits.clone()

        monkeypatch.setattr(module, "last_logits", last)
        monkeypatch.setattr(module, "_limit", lambda *args: 1e-3)
        runs = [Run(tokens, 0.0, 0.0, "length") for tokens in (got, expected)]
        prompt = encode(loaded, "abc", 5)
        return compare(loaded, prompt, Decode(16, None), Sampling(), ("replay", runs[0]), ("stock", runs[1]))

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
    short = judge([1, 2], [1, 2, 3], 0.0)
    assert (short.status, short.position) == ("different", 2)
    assert "after 2 equal tokens" in short.describe()


def test_limit_is_of_the_size_of_rounding(loaded):
    prompt = encode(loaded, "abcdef", 20)
    decode, sampling = Decode(16, "float32"), Sampling()
    logits = module.last_logits(loaded, prompt, "stock", decode, sampling, 3)
    tokens = [int(logits.argmax())] * 3
    assert logits.shape == (257,)
    fp32 = module._limit(loaded, prompt, decode, sampling, tokens, logits)
    bf16 = module._limit(loaded, prompt, Decode(16, "bfloat16"), sampling, tokens, logits)
    assert fp32 > 0
    assert bf16 >= 8 * 2**-7 * float(logits.abs().max())


def test_last_logits_choose_the_token(loaded):
    from replayssm.cli.decoding import run

    prompt = encode(loaded, "abcdef", 20)
    decode, sampling = Decode(4, None), Sampling()
    done = run(loaded, prompt, "replay", decode, sampling, 8)
    for at in (0, 3, 7):
        logits = module.last_logits(loaded, prompt, "replay", decode, sampling, at)
        assert int(logits.argmax()) == done.tokens[at]
