"""Orders choices by compression, maps groups of layers to them, and keeps a budget on their error."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor, from_string
from gradcomp.compress.groups import Piece, group_of
from gradcomp.control.candidates import HYBRID, CandidateLevels, Candidates
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")
Numbers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


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


def bytes_of(candidates: CandidateLevels, row: int) -> Doubles:
    """Returns the bytes of every choice of a row; those of its payload if nothing is sent, as in a world of one."""
    choices, spec = candidates.choices[row], candidates.specs[row]
    costs = candidates.costs[row, : len(choices)]
    if costs.any():
        return costs
    groups = (group_of([Piece(0, 0, spec.size)], [spec], [choice]) for choice in choices)
    return np.array([float(group.compressor.wire_bytes(group).sum()) for group in groups])


def levels_by_bytes(candidates: CandidateLevels) -> list[Numbers]:
    """Returns every row's choices from the least compression to the most; equal ones in the order given."""
    return [np.argsort(-bytes_of(candidates, row), kind="stable") for row in range(len(candidates.choices))]


def total_error(observed: PeriodObservations, choices: Numbers) -> float:
    """Returns the sum of the L2 errors of the rows that had a gradient."""
    assert observed.errors is not None, "asked for"
    rows = np.flatnonzero(~observed.silent)
    return float(observed.errors[rows, choices[rows]].sum())


def total_bytes(observed: PeriodObservations, choices: Numbers) -> float:
    """Returns the bytes that a rank sends per step."""
    return float(observed.costs[np.arange(len(choices)), choices].sum())


def keeping_silent(observed: PeriodObservations, choices: Numbers) -> Numbers:
    """Returns the choices, except that rows without a gradient keep their current ones."""
    kept: Numbers = np.where(observed.silent, observed.current, choices).astype(np.int64)
    return kept


class GroupLevels:
    """Moves groups of rows between levels, the most sensitive group first; rows of no group keep ``choices``."""

    def __init__(self, candidates: CandidateLevels, choices: Numbers, groups: Sequence[Numbers]) -> None:
        self.choices = choices.copy()
        self._groups = groups
        self._order = levels_by_bytes(candidates)
        self._last = np.array([len(levels) - 1 for levels in self._order], dtype=np.int64)
        self._at = np.array(
            [int(np.flatnonzero(levels == k)[0]) for levels, k in zip(self._order, choices, strict=True)]
        )
        #: Compression of each group, from 0 for the least to 1 for the most.
        self.height = np.array([self._height(rows) for rows in groups])
        #: True for groups with more than one level.
        self.movable = np.array([self._last[rows].any() for rows in groups])

    def _height(self, rows: Numbers) -> float:
        return float((self._at[rows] / np.maximum(self._last[rows], 1)).max())

    def put(self, group: int, at: Numbers) -> None:
        """Moves a group's rows to these levels, or to the nearest that they have."""
        rows = self._groups[group]
        self._at[rows] = np.clip(at, 0, self._last[rows])
        self.height[group] = self._height(rows)
        self.choices[rows] = [self._order[row][self._at[row]] for row in rows]

    def spread(self) -> None:
        """Spreads groups evenly from the least compression to the most; a single group stays."""
        count = len(self._groups)
        for j, rows in enumerate(self._groups if count > 1 else ()):
            self.put(j, np.floor(j / (count - 1) * self._last[rows] + 0.5).astype(np.int64))

    def move(self, group: int, by: int) -> Numbers:
        """Moves a group ``by`` levels to more compression; returns its previous levels, for :meth:`put`."""
        before: Numbers = self._at[self._groups[group]]
        self.put(group, before + by)
        return before


def linear_map(
    observed: PeriodObservations, groups: Sequence[Numbers], alpha: float | None
) -> Numbers | None:
    """Maps levels linearly to groups: the first group gets the least compression, the last the most.

    With n levels, the layers of group j of k (from 0) get number round(j (n-1) / (k-1)); a single group gets the
    reference. With ``alpha``, the total error is brought to alpha times that of the reference, in the order of the
    groups:

    - while it is above, the group with the most compression, of several the first, moves one level back; if all end at
    the
      least compression, the result is the reference if that is within the budget, else None;
    - then, while it is not above, the group with the least compression, of several the last, moves one level on;
    - if the reference is within the budget and takes fewer bytes, the result is the reference.

    Layers without a gradient keep their choice.
    """
    reference = keeping_silent(observed, observed.candidates.reference)
    grouped = GroupLevels(observed.candidates, reference, groups)
    grouped.spread()
    if alpha is None or not groups:
        return grouped.choices
    budget = alpha * total_error(observed, reference)
    while total_error(observed, grouped.choices) > budget:
        most = int(np.argmax(grouped.height))
        if not grouped.height[most]:
            return reference if alpha >= 1 else None
        grouped.move(most, -1)
    while (free := np.flatnonzero(grouped.movable & (grouped.height < 1))).size:
        least = int(free[::-1][np.argmin(grouped.height[free[::-1]])])
        before = grouped.move(least, 1)
        if total_error(observed, grouped.choices) > budget:
            grouped.put(least, before)
            break
    cheaper = total_bytes(observed, reference) < total_bytes(observed, grouped.choices)
    return reference if alpha >= 1 and cheaper else grouped.choices


def fallback(observed: PeriodObservations, name: str, alpha: float) -> Decision:
    """Returns the reference, since nothing is within the budget.

    It logs a warning unless ``memory[0]`` says that one was given.
    """
    if not observed.memory[0]:
        logger.warning(
            "%s: no choice of levels has at most %g times the error of the reference; layers use the reference",
            name,
            alpha,
        )
    return Decision(
        keeping_silent(observed, observed.candidates.reference), np.ones(1), "nothing is within the budget"
    )
