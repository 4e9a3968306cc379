"""The observations and decisions of periodic controllers, and the checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np

from gradcomp.compress import Compressor, from_string
from gradcomp.compress.checks import is_number
from gradcomp.control.base import Doubles, Mask, Numbers
from gradcomp.control.candidates import HYBRID, CandidateLevels, Candidates
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PeriodObservations:
    """Measurements of a period, equal on all ranks. A row is a controlled layer, or a block of one.

    ``norm``: L2 norm of the accumulated gradient; ``mean``, ``deviation``: mean and standard deviation of its elements.
    ``errors[i, k]``: L2 error of choice k of row i on that gradient, inf if there is no choice k; None unless the
    controller ``needs_errors``. ``wire``: seconds that the layer's exchange buckets spent on the wire in the period,
    averaged over ranks; ``sent``: bytes that a rank sent for them, by formula. ``nonzero``: average number of nonzero
    elements, for rows with choices that leave zeros out; None if there is no such choice. ``position``: the last
    exchange bucket that the layer is in. ``current``: the current choice. ``memory``: what the previous decision
    stored. ``rate_fall``: the relative fall of the learning rate since the previous period.
    """

    step: int
    candidates: CandidateLevels
    norm: Doubles
    mean: Doubles
    deviation: Doubles
    errors: Doubles | None
    wire: Doubles
    sent: Doubles
    position: Numbers
    current: Numbers
    memory: Doubles
    rate_fall: float = 0.0
    nonzero: Doubles | None = None

    @cached_property
    def costs(self) -> Doubles:
        """Returns the costs of the candidates in bytes per step and rank, for the observed number of zeros."""
        return self.candidates.costs if self.nonzero is None else self.candidates.expected_costs(self.nonzero)

    @property
    def silent(self) -> Mask:
        """Returns a mask of the rows without a gradient, for which there is nothing to decide by."""
        quiet: Mask = self.norm == 0
        return quiet

    def keeping_silent(self, choices: Numbers) -> Numbers:
        """Returns the choices, except that rows without a gradient keep their current ones."""
        return np.where(self.silent, self.current, choices).astype(np.int64)

    def total_error(self, choices: Numbers) -> float:
        """Returns the sum of the L2 errors of the rows that had a gradient."""
        assert self.errors is not None, "asked for"
        rows = np.flatnonzero(~self.silent)
        return float(self.errors[rows, choices[rows]].sum())

    def total_bytes(self, choices: Numbers) -> float:
        """Returns the bytes that a rank sends per step."""
        return float(self.costs[np.arange(len(choices)), choices].sum())


@dataclass(frozen=True)
class Decision:
    """The choice ``choices[i]`` of each row i, the ``memory`` for the next decision, and the ``reason`` for the log."""

    choices: Numbers
    memory: Doubles
    reason: str = ""


# --- checks -------------------------------------------------------------------------------------------------


def checked(choice: Any, what: str) -> int | float | Compressor:
    """Returns a level or a compressor, parsed from its string form if need be; errors begin with ``what``."""
    if isinstance(choice, str):
        choice = from_string(choice)
    if isinstance(choice, Compressor):
        if choice.changes:
            raise ConfigError(f"{what} must not be a schedule itself, got {choice.to_string()}")
        return choice
    if not _is_number(choice):
        raise ConfigError(f"{what} must be a level, a compressor or a string form, got {choice!r}")
    return choice


def text(choice: int | float | Compressor) -> str | int | float:
    """Returns the choice as JSON holds it: the inverse of :func:`checked`."""
    return choice.to_string() if isinstance(choice, Compressor) else choice


def _is_number(value: Any) -> TypeGuard[int | float]:
    return is_number(value) and math.isfinite(value)


def check_number(name: str, value: Any, *, positive: bool = False) -> None:
    """Raises ConfigError unless the value is a finite number, above 0 if it must be ``positive``."""
    if not _is_number(value) or (positive and value <= 0):
        raise ConfigError(f"{name} must be a finite number{' above 0' * positive}, got {value!r}")


def check_count(name: str, value: Any, *, most: int | None = None) -> None:
    """Raises ConfigError unless the value is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    if most is not None and value > most:
        raise ConfigError(f"{name} must be at most {most}, got {value!r}")


def check_levels(levels: Candidates | None) -> None:
    """Raises ConfigError for levels that no layer can have; the layers' own checks come later."""
    if levels is None or levels == HYBRID:
        return
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise ConfigError(
            f"levels must be a sequence of levels or compressors, and not empty, or {HYBRID!r}, got {levels!r}"
        )
    for level in levels:
        checked(level, "a level")
