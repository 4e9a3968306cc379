"""The layout of rows in a double buffer, and the value that is current for each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.core.vectors import Indices


class Rows:
    """Rows in two arenas, one after the other: each has its current value in one and its next value in the other.

    ``lengths``: elements per row. ``line``: elements of a cache line, at which every row begins.
    """

    def __init__(self, lengths: Sequence[int], line: int) -> None:
        self.lengths: Indices = np.asarray(lengths, dtype=np.int64)
        padded = -(-self.lengths // line) * line
        self._offsets: Indices = np.concatenate(([0], np.cumsum(padded))).astype(np.int64)
        self._total = int(self._offsets[-1])
        self._current = np.zeros(len(self.lengths), dtype=np.int64)

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        """Returns the elements of both arenas at which the rows' current values and their next values begin."""
        current = self._current[rows] * self._total
        offsets = self._offsets[rows]
        return current + offsets, self._total - current + offsets

    def turn(self, rows: Indices) -> bytes:
        """Returns which of the two arenas is current for each row; with the rows it determines :meth:`places`."""
        return self._current[rows].tobytes()

    def commit(self, rows: npt.NDArray[np.bool_]) -> None:
        """Makes the next value current for the rows where the mask is true."""
        self._current[rows] ^= 1

    def _begin(self, row: int) -> int:
        return int(self._current[row]) * self._total + int(self._offsets[row])
