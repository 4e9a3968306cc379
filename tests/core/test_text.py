"""What other processes say is shown on one line, escaped and bounded."""

from __future__ import annotations

import pytest

from gradcomp.core.strings import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain sentence", "a plain sentence"),
        ("naïve 模型", "naïve 模型"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("two\nlines\r\t", r"two\nlines\r\t"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\ud800", r"\ud800"),
        (b"\xff\x1b", r"\xff\x1b"),
        ("模型".encode(), "模型"),
    ],
)
def test_what_a_terminal_could_act_on_is_escaped(text: str | bytes, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["x" * 101, "\x1b" * 100, b"\xff" * 10_000, "\U0010ffff" * 10**6])
def test_long_text_is_cut_and_says_so(text: str | bytes) -> None:
    shown = printable(text, 100)
    assert len(shown) == 100
    assert shown.endswith(f"(cut, of {len(text)})")


@pytest.mark.parametrize("text", ["x" * 10**5, "\x1b" * 10**5, "\n"])
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert printable(printable(text)) == printable(text)
