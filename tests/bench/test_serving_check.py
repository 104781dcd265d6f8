import pytest
import torch

from replayssm.bench import serving_check as check
from replayssm.bench.serving_check import Reference, Transcript
from replayssm.engine.request import Logprob


def said(*tokens, shift=0.0, tops=None):
    """Each token with a log-probability of -1 + shift, and another one, 100 above it, with -1.01."""
    told = []
    for i, token in enumerate(tokens):
        others = (tops or {}).get(i, {token + 100: -1.01})
        told.append(Logprob(token, -1 + shift, ((token, -1 + shift), *others.items())))
    return Transcript([1, 2], told)


def reference(*transcripts, noise=0.01):
    return Reference(list(transcripts), noise, noise / 2, spread=1.0, rounding=1e-6)


def test_limit_is_a_few_times_the_noise_within_reason():
    assert reference(noise=0.01).limit == pytest.approx(0.04)
    assert reference(noise=0.0).limit == pytest.approx(4e-6)
    assert reference(noise=5.0).limit == 2


def test_equal():
    verdict = check.judge([said(3, 4, 5, shift=0.03)], reference(said(3, 4, 5)))
    assert (verdict.status, verdict.ok, verdict.position, verdict.gap) == ("equal", True, None, None)
    assert verdict.delta == pytest.approx(0.03)
    assert "0.03, limit 0.04" in str(verdict)


def test_equal_tokens_of_other_probability_are_not_equal():
    verdict = check.judge([said(3, 4, 5, shift=0.1)], reference(said(3, 4, 5)))
    assert (verdict.status, verdict.ok) == ("different", False)


def test_near_tie_is_named_and_what_follows_does_not_count():
    verdict = check.judge([said(3, 4), said(3, 104)], reference(said(3, 4), said(3, 4)))
    assert (verdict.status, verdict.ok) == ("near-tie", True)
    assert (verdict.request, verdict.position) == (1, 1)
    assert verdict.gap == pytest.approx(0.01)
    far = check.judge([said(104, 9, shift=-0.01)], reference(said(4, 5)))
    assert far.ok
    assert far.delta == 0  # the inputs of the second token differ


def test_a_token_that_is_less_likely_than_noise_explains():
    verdict = check.judge([said(3, 104)], reference(said(3, 4, tops={1: {104: -1.2}})))
    assert (verdict.status, verdict.ok, verdict.position) == ("different", False, 1)
    assert verdict.gap == pytest.approx(0.2)
    assert "first difference in request 0 at token 1, gap 0.2" in str(verdict)


def test_a_token_that_is_not_among_the_likely_ones():
    verdict = check.judge([said(3, 77)], reference(said(3, 4)))
    assert not verdict.ok
    assert verdict.gap == pytest.approx(0.01)  # at least


def test_one_wrong_request_is_enough():
    wrong = check.judge([said(104, 4), said(3, 77)], reference(said(4, 4), said(3, 4)))
    assert (wrong.ok, wrong.request, wrong.position) == (False, 1, 1)


def test_nan_is_never_right():
    nan = float("nan")
    assert not check.judge([said(3, 4, shift=nan)], reference(said(3, 4))).ok
    assert not check.judge_packed(reference(said(3, 4), noise=nan)).ok


def test_packed_decode_against_the_whole_forward():
    assert check.judge_packed(reference(said(3), noise=0.1)).status == "reference"
    wrong = check.judge_packed(reference(said(3), noise=3.0))
    assert (wrong.status, wrong.ok) == ("different", False)


@pytest.mark.parametrize(("batch", "rows"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (256, [0, 1, 128, 255])])
def test_which_requests_are_checked(batch, rows):
    assert check.checked(batch) == rows
    told = [i for i, one in enumerate(check.sampling(batch, 5)) if one.logprobs is not None]
    assert told == rows


def test_the_noise_is_that_of_one_forward():
    """A model whose logits do not depend on the text, and an engine that said something else by 0.25."""
    logits = torch.linspace(-2, 2, 9)

    class Model:
        device, dtype = torch.device("cpu"), torch.float32

        def __call__(self, input_ids, use_cache, logits_to_keep):
            assert input_ids.tolist() == [[1, 2, 8]]  # the prompt, and all of the answer but its last token
            assert logits_to_keep == 2

            class Out:
                pass

            Out.logits = logits.expand(1, 2, -1)
            return Out

    class Engine:
        class runner:
            model = Model()

    exact = float(logits.log_softmax(-1)[8])
    told = [Logprob(8, exact, ((8, exact),)), Logprob(8, exact - 0.25, ((8, exact),))]
    found = check.reference(Engine, [Transcript([1, 2], told)])
    assert found.noise == pytest.approx(0.25, rel=1e-4)
    assert found.usual == pytest.approx(0.125, rel=1e-4)
    assert found.spread == pytest.approx(float(logits.std()))
    assert found.rounding == pytest.approx(2 * 2**-24)
