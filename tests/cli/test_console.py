import io
import sys

import pytest

from replayssm.cli.console import human_bytes, print_json, print_table


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 << 10, "1.50 MiB"),
        (134 << 10, "134 KiB"),
        (1234567, "1.18 MiB"),
        (1010 * 1024, "1010 KiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_human_bytes(n, text):
    assert human_bytes(n) == text


def test_json_has_no_nan(capsys):
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": "é"}, sys.stdout)
    assert capsys.readouterr().out == '{"a": [null, [null, 1.5]], "b": "é"}\n'


def test_plain_tables_are_aligned_and_never_cut():
    out = io.StringIO()
    print_table(("name", "n"), [("a", "1"), ("x" * 200, "1000")], out)
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["name", "n"]
    assert lines[1] == "a" + " " * 205 + "1"
    assert lines[2] == "x" * 200 + "   1000"


def test_empty_header_is_not_shown():
    out = io.StringIO()
    print_table(("", ""), [("a", "[b] :smile:")], out, left=2)
    assert out.getvalue() == "a   [b] :smile:\n"
