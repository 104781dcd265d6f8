"""The table of routes: complete, and read as it says. Its numbers are measurements and not repeated here."""

from __future__ import annotations

import pytest

from replayssm.kernels.policy import FROM_HEADS, decode_route
from replayssm.spec import DTYPE_BYTES, RING_LEN_MAX, STATE_DTYPES

ENTRIES = [(device, *key, entry) for device, table in FROM_HEADS.items() for key, entry in table.items()]
each_entry = pytest.mark.parametrize(("device", "is_kda", "elem_bytes", "entry"), ENTRIES)


def test_every_state_dtype_and_kind_has_an_entry():
    keys = {(is_kda, DTYPE_BYTES[dtype]) for is_kda in (False, True) for dtype in STATE_DTYPES}
    assert all(table.keys() == keys for table in FROM_HEADS.values())


@each_entry
def test_every_ring_length_has_an_entry(device, is_kda, elem_bytes, entry):
    assert 1 in entry
    assert list(entry) == sorted(entry)
    assert max(entry) <= RING_LEN_MAX


@each_entry
def test_a_ring_of_one_never_pays(device, is_kda, elem_bytes, entry):
    """Every step would write the state, as packed decode does."""
    assert entry[1] is None


@each_entry
def test_replay_from_the_listed_number_of_heads_on(device, is_kda, elem_bytes, entry):
    lengths = list(entry)
    for length, following in zip(lengths, [*lengths[1:], RING_LEN_MAX + 1], strict=True):
        least = entry[length]
        for heads in (0, 1, 10**9) if least is None else (0, 1, least - 1, least, least + 1, 10**9):
            want = "packed" if least is None or heads < least else "replay"
            for ring_len in {length, following - 1}:
                assert decode_route(device, is_kda, elem_bytes, heads, ring_len) == want


def test_a_cpu_always_replays():
    assert {decode_route("cpu", kda, size, 1, 64) for kda in (False, True) for size in (2, 4)} == {"replay"}
