"""What is written to a terminal moves no cursor and ends no line, whatever names hold."""

from __future__ import annotations

import sys

import pytest

from dist_consolidate.errors import has_controls, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, with umlauts \u00e4 and \u6a21\u578b", None),
        ("lines\nstay\n  - lines", None),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\rb\tc\x7f\x9b", r"a\rb\tc\x7f\x9b"),
        ("a\u202eb\u2066", r"a\u202eb\u2066"),
        ("half \ud800", r"half \ud800"),
        ("\0", r"\x00"),
        ("\u2028", r"\u2028"),
    ],
)
def test_printable(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_every_character() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = "".join(printable(every[at : at + 1000]) for at in range(0, len(every), 1000))
    assert all(character.isprintable() for character in shown.replace("\n", ""))
    assert shown.count("\n") == 1


def test_endless_lines_are_shortened() -> None:
    shown = printable("a" * 10_000_000 + "\nb")
    assert len(shown) < 5000
    assert "characters" in shown
    assert shown.endswith("\nb")


def test_controls() -> None:
    assert has_controls("a\nb")
    assert has_controls("\x9b")
    assert not has_controls("a\u202eb \ud800 \u3000")
