"""Text as it grows: the pieces joined are the whole, characters stay whole, stop texts never show."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.engine.text import TextStream
from replayssm.models.loading import load_model
from tests.cli.conftest import byte_tokenizer

BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("gdn").tokenizer


def stream(tokenizer, text, stop=()):
    return run(tokenizer, tokenizer(text, add_special_tokens=False).input_ids, stop)


def run(tokenizer, ids, stop=()):
    s = TextStream(tokenizer, stop)
    pieces = [s.push(i) for i in ids]
    return s, [*pieces, s.finish()]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(text=st.text(min_size=0, max_size=30), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_are_the_text_up_to_the_first_stop(text, stop):
    """One token a byte, so that characters and stop texts fall apart."""
    s, pieces = stream(BYTES, text, stop)
    found = [(text.find(word), word) for word in stop if word in text]
    want = text[: min(found)[0]] if found else text
    assert "".join(pieces) == s.text == want
    assert (s.stopped is None) == (not found)
    if found:
        assert s.stopped in stop
        assert text.find(s.stopped) == min(found)[0]


def test_words_come_as_they_are(tokenizer):
    text = "And it came to pass, “in those days”, that… 東京 🙂 ended.\n\n"
    s, pieces = stream(tokenizer, text)
    assert s.text == text
    assert sum(bool(piece) for piece in pieces) > 8
    assert not any("�" in piece for piece in pieces)


def test_what_may_be_a_stop_is_held_back():
    s = TextStream(BYTES, ["END"])
    ids = BYTES("an ENd, an END, more", add_special_tokens=False).input_ids
    pieces = [s.push(i) for i in ids]
    assert pieces[:8] == ["a", "n", " ", "", "", "ENd", ",", " "]
    assert s.text == "an ENd, an "
    assert s.stopped == "END"
    assert s.finish() == ""
    assert s.push(ids[0]) == ""


@pytest.mark.parametrize("size", [1, 100])
def test_the_stop_that_begins_first_counts(size, monkeypatch):
    """Of two that begin at one place the longer, if both are there at once."""
    for stops, text, stopped in ((["yz", "xy"], "a", "xy"), (["zw", "y"], "ax", "y"), (["x", "xyz"], "a", "x")):
        s = TextStream(BYTES, stops)
        if size > 1:  # all in one token
            monkeypatch.setattr(s, "_stream", type("One", (), dict(step=lambda self, tokenizer, token: "axyzw"))())
            s.push(0)
            stopped = "xyz" if "xyz" in stops else stopped
        else:
            [s.push(i) for i in BYTES("axyzw", add_special_tokens=False).input_ids]
        assert (s.text, s.stopped) == (text, stopped)


def test_an_end_in_the_middle_of_a_stop_gives_back_what_was_held():
    s, pieces = stream(BYTES, "so EN", ["END"])
    assert pieces[-1] == "EN"
    assert s.stopped is None


def test_half_a_character_at_the_end_is_shown_as_such():
    ids = BYTES("ab🙂", add_special_tokens=False).input_ids[:-1]
    s, pieces = run(BYTES, ids)
    assert "".join(pieces[:-1]) == "ab"
    assert s.text.startswith("ab")
    assert set(s.text[2:]) == {"�"}


def test_special_tokens_do_not_show():
    s, _ = run(BYTES, [*BYTES("a", add_special_tokens=False).input_ids, BYTES.eos_token_id])
    assert s.text == "a"
