"""Checks of the arguments of controllers."""

from __future__ import annotations

import math
from typing import Any

from gradcomp.compress import Compressor, from_string
from gradcomp.core.errors import ConfigError


def checked(choice: Any, what: str) -> int | float | Compressor:
    """Returns a level or a compressor, parsed from its string form if need be; errors begin with ``what``."""
    if isinstance(choice, str):
        choice = from_string(choice)
    if isinstance(choice, Compressor):
        if choice.changes:
            raise ConfigError(f"{what} must not be a schedule itself, got {choice.to_string()}")
        return choice
    if isinstance(choice, bool) or not isinstance(choice, int | float) or not math.isfinite(choice):
        raise ConfigError(f"{what} must be a level, a compressor or a string form, got {choice!r}")
    return choice


def text(choice: int | float | Compressor) -> str | int | float:
    """Returns the choice as JSON holds it: the inverse of :func:`checked`."""
    return choice.to_string() if isinstance(choice, Compressor) else choice


def check_positive(name: str, value: Any) -> None:
    """Raises ConfigError unless the value is a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raises ConfigError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
