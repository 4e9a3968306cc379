"""Choices in the order of compression, groups of layers on them, and a budget for what they lose."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.compress.groups import Piece, group_of
from gradcomp.control.checks import checked
from gradcomp.control.menu import Candidates, Menu
from gradcomp.control.periodic import Decision, Seen
from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")

Numbers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def check_levels(levels: Candidates | None) -> None:
    """ConfigError for levels that no layer could have; the layers' own checks come later."""
    if levels is None:
        return
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise ConfigError(
            f"levels must be a sequence of levels or compressors, and not empty, got {levels!r}"
        )
    for level in levels:
        checked(level, "a level")


def bytes_of(menu: Menu, row: int) -> Doubles:
    """Bytes of every choice of a row; of its payload where nothing is sent, as in a world of one."""
    choices, spec = menu.choices[row], menu.specs[row]
    costs = menu.costs[row, : len(choices)]
    if costs.any():
        return costs
    groups = (group_of([Piece(0, 0, spec.size)], [spec], [choice]) for choice in choices)
    return np.array([float(group.compressor.wire_bytes(group).sum()) for group in groups])


def ladders(menu: Menu) -> list[Numbers]:
    """Every row's choices from the least compression to the most; of equal bytes, in the order given."""
    return [np.argsort(-bytes_of(menu, row), kind="stable") for row in range(len(menu.choices))]


def total_error(seen: Seen, choices: Numbers) -> float:
    """Sum of the L2 norms of what layers lose, without those of which nothing was seen."""
    assert seen.errors is not None, "asked for"
    rows = np.flatnonzero(~seen.silent)
    return float(seen.errors[rows, choices[rows]].sum())


def total_bytes(seen: Seen, choices: Numbers) -> float:
    """Bytes that a rank sends per step."""
    return float(seen.menu.costs[np.arange(len(choices)), choices].sum())


def keeping_silent(seen: Seen, choices: Numbers) -> Numbers:
    """The choices, but layers of which nothing was seen keep theirs."""
    kept: Numbers = np.where(seen.silent, seen.current, choices).astype(np.int64)
    return kept


def linear_map(seen: Seen, groups: Sequence[Numbers], alpha: float | None) -> Numbers | None:
    """Levels that go linearly from the least compression, of the first group, to the most, of the last.

    Of a ladder of n rungs, the layers of group j of k (from 0) take rung round(j (n-1) / (k-1)); a single group takes
    the reference. While the total error is above ``alpha`` times the reference's, the group with the most compression,
    of several the first, goes one rung back; None if that ends at the least compression for all. Where the reference
    meets the budget with fewer bytes, it is the reference. Layers of which nothing was seen keep their choice.
    """
    reference = keeping_silent(seen, seen.menu.reference)
    rungs = ladders(seen.menu)
    last = np.array([len(ladder) - 1 for ladder in rungs])
    at = np.array([int(np.flatnonzero(ladder == k)[0]) for ladder, k in zip(rungs, reference, strict=True)])
    if len(groups) > 1:
        for j, rows in enumerate(groups):
            at[rows] = np.floor(j / (len(groups) - 1) * last[rows] + 0.5)
    height = np.array([(at[rows] / np.maximum(last[rows], 1)).max() for rows in groups])
    choices = reference.copy()
    for rows in groups:
        choices[rows] = [rungs[row][at[row]] for row in rows]
    if alpha is None:
        return choices
    budget = alpha * total_error(seen, reference)
    while total_error(seen, choices) > budget:
        most = int(np.argmax(height))
        if not height[most]:
            return None
        rows = groups[most]
        at[rows] = np.maximum(at[rows] - 1, 0)
        height[most] = (at[rows] / np.maximum(last[rows], 1)).max()
        choices[rows] = [rungs[row][at[row]] for row in rows]
    cheaper = total_bytes(seen, reference) < total_bytes(seen, choices)
    return reference if alpha >= 1 and cheaper else choices


def fallback(seen: Seen, name: str, alpha: float) -> Decision:
    """The reference, since nothing meets the budget. The warning comes once: ``memory[0]`` says whether it has."""
    if not seen.memory[0]:
        logger.warning(
            "%s: nothing loses at most %g times what the reference does; layers go back to the reference",
            name,
            alpha,
        )
    return Decision(keeping_silent(seen, seen.menu.reference), np.ones(1), "nothing meets the budget")
