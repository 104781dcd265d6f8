"""Parameters are checked when they are made, with the value and the limit in the message."""

import math

import pytest

from replayssm.engine.params import SamplingParams
from replayssm.errors import OptionError

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(temperature=-0.1), r"temperature -0.1 is outside \[0, 100\]"),
        (dict(temperature=NAN), "temperature nan"),
        (dict(temperature=INF), "temperature inf"),
        (dict(temperature="hot"), "temperature 'hot'"),
        (dict(temperature=True), "temperature True"),
        (dict(top_p=0.0), r"top_p 0.0 is outside \(0, 1\]"),
        (dict(top_p=1.1), "top_p 1.1"),
        (dict(min_p=-0.1), "min_p -0.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty 0.0"),
        (dict(presence_penalty=2.5), "presence_penalty 2.5"),
        (dict(frequency_penalty=-2.5), "frequency_penalty -2.5"),
        (dict(top_k=-1), "top_k -1"),
        (dict(top_k=1.5), "top_k 1.5 is no whole number"),
        (dict(max_tokens=0), "max_tokens 0"),
        (dict(min_tokens=300), "min_tokens 300 is outside 0…256"),
        (dict(n=0), "n 0"),
        (dict(n=2, temperature=0.0), "n = 2 greedy outputs"),
        (dict(seed=-1), "seed -1"),
        (dict(seed=2**63), "seed 9223372036854775808"),
        (dict(logprobs=21), "logprobs 21 is outside 0…20"),
        (dict(logit_bias={-1: 1.0}), "logit_bias token -1"),
        (dict(logit_bias={"a": 1.0}), "logit_bias token 'a'"),
        (dict(logit_bias={3: 101.0}), "logit_bias 101.0 of token 3"),
        (dict(logit_bias={3: INF}), "logit_bias inf"),
        (dict(stop=("",)), "none of them empty"),
        (dict(stop=tuple("abcdefghijklmnopq")), "at most 16"),
        (dict(stop_token_ids=(-2,)), "stop_token_ids -2"),
    ],
)
def test_refusals(change, said):
    with pytest.raises(OptionError, match=said):
        SamplingParams(**change)


def test_limits_are_allowed():
    SamplingParams(
        temperature=100, top_p=1, min_p=1, top_k=10**9, presence_penalty=-2, frequency_penalty=2, seed=2**63 - 1,
        logprobs=20, logit_bias={0: -INF, 1: 100, 2: -100}, max_tokens=3, min_tokens=3, n=128,
    )  # fmt: skip
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(temperature=0).greedy


def test_tokens_must_exist():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(9,), top_k=10).check_vocabulary(10)
    for params, said in (
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias names token 10, but the vocabulary has 10 tokens, 0…9"),
        (SamplingParams(stop_token_ids=(3, 12)), "stop_token_ids names token 12"),
        (SamplingParams(top_k=11), "top_k 11 exceeds the vocabulary of 10"),
    ):
        with pytest.raises(OptionError, match=said):
            params.check_vocabulary(10)
