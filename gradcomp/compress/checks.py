"""Checks of compressors' fields. Each raises ConfigError, with the field's name and value, for an invalid value."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeGuard

from gradcomp.core.errors import ConfigError

_INTERVALS = {"(0, 1]": lambda x: 0 < x <= 1, "[0, 1)": lambda x: 0 <= x < 1, "[0, 1]": lambda x: 0 <= x <= 1}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; a bool does not count as one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(name: str, value: object, interval: str) -> None:
    """Accept numbers in ``interval``, which is a key of ``_INTERVALS``."""
    if not is_number(value) or not _INTERVALS[interval](value):
        raise ConfigError(f"{name} must be in {interval}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Accept finite numbers above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be positive and finite, got {value!r}")


def check_whole(
    name: str, value: object, least: int = 1, most: int | None = None, *, or_none: bool = False
) -> None:
    """Accept whole numbers from ``least`` to ``most``, and None if ``or_none`` is true."""
    limit = math.inf if most is None else most
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= limit
    if not whole and not (or_none and value is None):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(
            f"{name} must be a whole number {wanted}{', or none' if or_none else ''}, got {value!r}"
        )


def check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    """Accept True and False, and None if ``or_none`` is true."""
    if not isinstance(value, bool) and not (or_none and value is None):
        raise ConfigError(
            f"{name} must be true{', false or none' if or_none else ' or false'}, got {value!r}"
        )


def check_word(name: str, word: object, words: Collection[str]) -> None:
    """Accept one of ``words``; the case of letters must match."""
    if word not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, got {word!r}")
