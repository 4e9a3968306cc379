"""EstimatedThreshold is the base of the compressors that send all elements above an estimated threshold."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress.messages import Bytes
from gradcomp.compress.sparse.base import LEAST_MAGNITUDE, ByDensity, Sparse
from gradcomp.compress.sparse.payload import Selection
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def is_number(value: object) -> bool:
    """Return whether a field holds a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class EstimatedThreshold(ByDensity, Sparse):
    """Base of the compressors with S = {i: |p_i| >= t}, where t is chosen for about k = round(density n) elements.

    If these are more than ``limits``, the largest of them are sent (ties to the lower index). Elements of 0 are not
    selected, whatever the threshold; a row that is not finite selects nothing. The level is the density.
    """

    by_kernels = True

    @abstractmethod
    def thresholds(self, table: Table, wanted: Sizes, step: int) -> Floats:
        """Return every row's threshold: p lies in its next residual and is finite; ``wanted`` is k."""

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """Select what reaches the threshold; a row that is not finite sends nothing."""
        table = group.inputs
        selection.contribute(table, flags, context.factors(len(table)), decay=context.decay)
        finite = flags == 0
        thresholds = np.full(len(table), np.nan, dtype=np.float32)  # no element reaches NaN
        rows = table[finite]
        thresholds[finite] = self.thresholds(rows, rows["level"].astype(np.int64), context.draw.step)
        thresholds = np.maximum(thresholds, LEAST_MAGNITUDE)
        limits = group.scratch.once("limits", lambda: self.limits(group.table))
        selection.select_above(
            table, thresholds, limits, chosen.offsets, chosen.indices, chosen.values, chosen.counts
        )


@dataclass(frozen=True, eq=False)
class Tails:
    """Hold, of the elements of each row with |p| >= its threshold: number, sums of |p| and |p|^2, and largest |p|."""

    counts: Sizes
    sums: Doubles
    squares: Doubles
    maxima: Floats

    @staticmethod
    def of(table: Table, thresholds: Floats) -> Tails:
        """Make one pass over the rows."""
        rows = len(table)
        found = Tails(np.zeros(rows, np.int64), np.zeros(rows), np.zeros(rows), np.zeros(rows, np.float32))
        selection.tail(table, thresholds, found.counts, found.sums, found.squares, found.maxima)
        return found

    def at(self, rows: npt.NDArray[np.bool_]) -> Tails:
        """Return the values of a subset of the rows."""
        return Tails(self.counts[rows], self.sums[rows], self.squares[rows], self.maxima[rows])
