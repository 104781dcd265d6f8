"""A model under a setting: its tokens are those of `generate`, its bits those of one forward, its repeats counted."""

import math
from types import SimpleNamespace

import pytest
import torch

from replayssm.errors import PromptError
from replayssm.models.loading import load_model
from replayssm.study import text
from replayssm.study.setting import BASELINE, Setting

WORDS = "And it came to pass in those days, that there was no bread in the land. " * 40


@pytest.fixture(scope="module")
def loaded():
    return load_model("gdn")


@pytest.fixture(scope="module")
def prompts(loaded):
    return text.rows_of(loaded, WORDS, 12)[:2, :20]


@pytest.mark.parametrize(
    "setting", [Setting("stock"), BASELINE, Setting("replay"), Setting("replay", ring_len=3, operands="exact")]
)
def test_greedy_tokens_are_those_of_generate(loaded, prompts, setting):
    got = text.decode(loaded, prompts, 12, setting)
    with text.using(loaded, setting):
        want = loaded.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
    assert torch.equal(got.tokens, want[:, prompts.shape[1] :])
    assert torch.equal(got.tokens, got.likeliest)


def test_bits_are_those_of_one_forward(loaded):
    (row,) = text.measure(loaded, WORDS, 10, [Setting("replay")])
    ids = text.rows_of(loaded, WORDS, 10)
    with torch.no_grad(), text.using(loaded, Setting("stock")):
        log_probs = loaded.model(ids).logits.log_softmax(-1)[:, text.PREFIX - 1 : -1]
    total = log_probs.gather(2, ids[:, text.PREFIX :, None]).sum()
    tokenizer = loaded.tokenizer
    count = sum(len(tokenizer.decode(r).encode()) - len(tokenizer.decode(r[: text.PREFIX]).encode()) for r in ids)
    assert row["bits_per_byte"] == pytest.approx(-float(total) / math.log(2) / count, rel=1e-5)
    assert row["tokens"] == 80
    assert row["top1"] == row["greedy_equal"] == 1
    assert row["greedy_rows"] == text.ROWS


def test_rounded_operands_reach_the_model(loaded, prompts):
    exact, rounded = (
        text.decode(loaded, prompts, 12, Setting("replay", operands=name)).log_probs for name in ("exact", "bf16")
    )
    assert 1e-6 < float((exact - rounded).abs().max()) < 0.5


def test_forced_tokens_are_followed(loaded, prompts):
    forced = torch.arange(24).view(2, 12) + 100
    assert torch.equal(text.decode(loaded, prompts, 12, Setting("replay"), forced=forced).tokens, forced)


def test_sampling_has_the_same_noise_for_every_setting(loaded, prompts):
    one, two = (text.decode(loaded, prompts, 12, s, temperature=0.8).tokens for s in (BASELINE, Setting("replay")))
    assert torch.equal(one, two)
    assert not torch.equal(one, text.decode(loaded, prompts, 12, BASELINE).tokens)


@pytest.mark.parametrize(
    ("row", "begin", "share"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, 0.0),
        ([1, 2, 3, 4, 1, 2, 3, 4], 4, 0.25),  # the last token ends 1 2 3 4 again
        ([1, 2, 3, 4, 1, 2, 3, 4], 0, 0.125),
        ([7] * 8, 4, 1.0),
        ([1, 2, 3, 4, 5, 1, 2, 3], 4, 0.0),
    ],
)
def test_repeats(row, begin, share):
    assert text.repeats(torch.tensor([row]), begin) == share
    assert text.repeats(torch.tensor([row, list(range(10, 18))]), begin) == share / 2


def test_too_little_text_is_refused(loaded):
    with pytest.raises(PromptError, match="need"):
        text.rows_of(loaded, "A few words.", 50)
    with pytest.raises(PromptError, match="context"):
        text.rows_of(SimpleNamespace(tokenizer=loaded.tokenizer, context_length=40), WORDS, 50)
