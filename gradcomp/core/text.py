"""Makes text from other processes safe for a log, an error or a terminal."""

from __future__ import annotations

_MOST_CHARACTERS = 2000


def printable(text: str | bytes, most: int = _MOST_CHARACTERS) -> str:
    """Returns the text on one line of at most ``most`` characters: escapes what a terminal could act on, cuts the rest.

    Control and format characters, line ends, and bytes that are not UTF-8 are escaped. Text that was made printable
    stays the same.
    """
    whole = len(text)
    if isinstance(text, bytes):
        text = text[: 4 * most + 4].decode(errors="backslashreplace")  # a character has up to four bytes
    # One character more than fits, so that a cut shows.
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    if len(shown) <= most:
        return shown
    end = f" ... (cut, of {whole})"
    return shown[: most - len(end)] + end
