import pytest

from replayssm.bench import roofline
from replayssm.spec import LayerSpec

SPEC = LayerSpec("gdn", 16, 32, 128, 128)
STATE = 32 * 128 * 128 * 4
RECORD = 32 * 128 * 4 + 16 * 128 * 2 + 32 * 4


def test_bytes_by_hand():
    assert roofline.step_bytes(SPEC, "packed", 8, 16, "float32", "bfloat16") == 8 * 2 * STATE
    replay = STATE + 7.5 * RECORD + STATE / 16 + 15 / 16 * RECORD
    assert roofline.step_bytes(SPEC, "replay", 8, 16, "float32", "bfloat16") == pytest.approx(8 * replay)
    assert roofline.step_bytes(SPEC, "packed", 1, 16, "bfloat16", "bfloat16") == STATE


def test_a_microsecond_for_a_megabyte_is_a_terabyte_per_second():
    assert roofline.gb_per_s(1e6, 1.0) == 1000


def test_percentiles():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [roofline.percentile(values, p) for p in (0, 10, 50, 90, 100)] == pytest.approx([1, 1.4, 3, 4.6, 5])
    assert roofline.percentile([7.0], 90) == 7


def row(kernel, route, us, peer=False, batch=1, state="float32", auto=None):
    return dict(kernel=kernel, route=route, us=us, peer=peer, batch=batch, state_dtype=state, auto_route=auto)


def test_ratios_compare_equal_batch_and_state_dtype_only():
    rows = [
        row("packed", "packed", 10.0),
        row("replay", "replay", 5.0),
        row("a", "packed", 8.0, peer=True),
        row("b", "packed", 9.0, peer=True),
        row("broken", "packed", None, peer=True),
        row("packed", "packed", 4.0, state="bfloat16"),
        row("replay", "replay", 5.0, state="bfloat16"),
        row("packed", "packed", None, batch=8),
        row("replay", "replay", 20.0, batch=8),
    ]
    roofline.add_ratios(rows)
    assert [r["vs_packed"] for r in rows] == [1, 2, 10 / 8, 10 / 9, None, 1, 0.8, None, None]
    assert [r["vs_best_peer"] for r in rows] == [0.8, 1.6, 1, 8 / 9, None, None, None, None, None]
    assert {r["auto_vs_packed"] for r in rows} == {None}


@pytest.mark.parametrize(
    ("auto", "packed", "replay", "ratio"),
    [
        ("replay", 10.0, 4.0, 2.5),
        ("packed", 10.0, 12.5, 1),
        ("packed", 10.0, None, 1),
        ("replay", 10.0, None, None),
        ("replay", None, 4.0, None),
        ("packed", None, 4.0, None),
    ],
)
def test_auto_has_the_time_of_the_route_it_takes(auto, packed, replay, ratio):
    rows = [row("packed", "packed", packed), row("replay", "replay", replay, auto=auto)]
    roofline.add_ratios(rows)
    assert [r["auto_vs_packed"] for r in rows] == [None, ratio]
