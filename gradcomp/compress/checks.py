"""Each check raises ConfigError, with the field's name and its value, if a compressor cannot have that value."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeGuard

from gradcomp.core.errors import ConfigError

_INTERVALS = {"(0, 1]": lambda x: 0 < x <= 1, "[0, 1)": lambda x: 0 <= x < 1, "[0, 1]": lambda x: 0 <= x <= 1}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a field holds a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(name: str, value: object, interval: str) -> None:
    """Take numbers in the interval, which is one of those above."""
    if not is_number(value) or not _INTERVALS[interval](value):
        raise ConfigError(f"{name} must be in {interval}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Take numbers above 0 that are not infinite."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be positive and finite, got {value!r}")


def check_whole(
    name: str, value: object, least: int = 1, most: int | None = None, *, or_none: bool = False
) -> None:
    """Take whole numbers from ``least`` to ``most``, and None where that is allowed."""
    limit = math.inf if most is None else most
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= limit
    if not whole and not (or_none and value is None):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(
            f"{name} must be a whole number {wanted}{', or none' if or_none else ''}, got {value!r}"
        )


def check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    """Take true and false, and None where that is allowed."""
    if not isinstance(value, bool) and not (or_none and value is None):
        raise ConfigError(
            f"{name} must be true{', false or none' if or_none else ' or false'}, got {value!r}"
        )


def check_word(name: str, word: object, words: Collection[str]) -> None:
    """Take one of ``words``, in the case in which it stands there."""
    if word not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, got {word!r}")
