"""Choices in the order of compression, groups of layers on them, and a budget for what they lose."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.compress.groups import Piece, group_of
from gradcomp.control.candidates import HYBRID, CandidateLevels, Candidates
from gradcomp.control.checks import checked
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")

Numbers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def check_levels(levels: Candidates | None) -> None:
    """ConfigError for levels that no layer could have; the layers' own checks come later."""
    if levels is None or levels == HYBRID:
        return
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise ConfigError(
            f"levels must be a sequence of levels or compressors, and not empty, or {HYBRID!r}, got {levels!r}"
        )
    for level in levels:
        checked(level, "a level")


def bytes_of(candidates: CandidateLevels, row: int) -> Doubles:
    """Bytes of every choice of a row; of its payload where nothing is sent, as in a world of one."""
    choices, spec = candidates.choices[row], candidates.specs[row]
    costs = candidates.costs[row, : len(choices)]
    if costs.any():
        return costs
    groups = (group_of([Piece(0, 0, spec.size)], [spec], [choice]) for choice in choices)
    return np.array([float(group.compressor.wire_bytes(group).sum()) for group in groups])


def levels_by_bytes(candidates: CandidateLevels) -> list[Numbers]:
    """Every row's choices from the least compression to the most; of equal bytes, in the order given."""
    return [np.argsort(-bytes_of(candidates, row), kind="stable") for row in range(len(candidates.choices))]


def total_error(observed: PeriodObservations, choices: Numbers) -> float:
    """Sum of the L2 norms of what layers lose, without those of which nothing was seen."""
    assert observed.errors is not None, "asked for"
    rows = np.flatnonzero(~observed.silent)
    return float(observed.errors[rows, choices[rows]].sum())


def total_bytes(observed: PeriodObservations, choices: Numbers) -> float:
    """Bytes that a rank sends per step."""
    return float(observed.costs[np.arange(len(choices)), choices].sum())


def keeping_silent(observed: PeriodObservations, choices: Numbers) -> Numbers:
    """The choices, but layers of which nothing was seen keep theirs."""
    kept: Numbers = np.where(observed.silent, observed.current, choices).astype(np.int64)
    return kept


class GroupLevels:
    """Groups of rows at their levels, the most sensitive group first; rows of no group keep ``choices``."""

    def __init__(self, candidates: CandidateLevels, choices: Numbers, groups: Sequence[Numbers]) -> None:
        self.choices = choices.copy()
        self._groups = groups
        self._order = levels_by_bytes(candidates)
        self._last = np.array([len(levels) - 1 for levels in self._order], dtype=np.int64)
        self._at = np.array(
            [int(np.flatnonzero(levels == k)[0]) for levels, k in zip(self._order, choices, strict=True)]
        )
        #: By group, from 0 for the least compression to 1 for the most.
        self.height = np.array([self._height(rows) for rows in groups])
        #: Groups that have a choice.
        self.movable = np.array([self._last[rows].any() for rows in groups])

    def _height(self, rows: Numbers) -> float:
        return float((self._at[rows] / np.maximum(self._last[rows], 1)).max())

    def put(self, group: int, at: Numbers) -> None:
        """A group's rows at these levels, or at the nearest that they have."""
        rows = self._groups[group]
        self._at[rows] = np.clip(at, 0, self._last[rows])
        self.height[group] = self._height(rows)
        self.choices[rows] = [self._order[row][self._at[row]] for row in rows]

    def spread(self) -> None:
        """Levels in equal distances, from the least compression to the most; a single group stays."""
        count = len(self._groups)
        for j, rows in enumerate(self._groups if count > 1 else ()):
            self.put(j, np.floor(j / (count - 1) * self._last[rows] + 0.5).astype(np.int64))

    def move(self, group: int, by: int) -> Numbers:
        """So many levels to more compression; where the rows were, for :meth:`put`."""
        before: Numbers = self._at[self._groups[group]]
        self.put(group, before + by)
        return before


def linear_map(
    observed: PeriodObservations, groups: Sequence[Numbers], alpha: float | None
) -> Numbers | None:
    """Levels that go linearly from the least compression, of the first group, to the most, of the last.

    Of n levels, the layers of group j of k (from 0) take number round(j (n-1) / (k-1)); a single group takes the
    reference. With ``alpha``, the total error is brought to alpha times the reference's, without exchanging groups:

    - while it is above, the group with the most compression, of several the first, goes one level back; if that ends at
      the least compression for all, it is the reference where that meets the budget, else None;
    - then, as long as it is not above, the group with the least compression, of several the last, goes one level on;
    - where the reference meets the budget with fewer bytes, it is the reference.

    Layers of which nothing was seen keep their choice.
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
    """The reference, since nothing meets the budget. The warning comes once: ``memory[0]`` says whether it has."""
    if not observed.memory[0]:
        logger.warning(
            "%s: nothing loses at most %g times what the reference does; layers go back to the reference",
            name,
            alpha,
        )
    return Decision(
        keeping_silent(observed, observed.candidates.reference), np.ones(1), "nothing meets the budget"
    )
