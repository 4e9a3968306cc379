"""Rows of bfloat16: 4 bytes per element for a current and a next value."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradcomp.core.rows import Rows
from gradcomp.core.vectors import LINE, Floats, host_zeros

_LARGEST = np.float32(2.0**128 - 2.0**120)


class Bfloat16Buffer(Rows):
    """Rows of bfloat16 in the host's memory, which start at zero. Values are given and taken as float32.

    A step rounds next values stochastically, see :mod:`gradcomp.pipeline.widened`. :meth:`set` rounds to nearest: it is
    called where rows move, and values that were rows before stay what they were.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths, 2 * LINE)
        #: Both arenas, as kernels take a payload; an element has two bytes.
        self.payload: npt.NDArray[np.uint8] = host_zeros(self._total).memory.view(np.uint8)
        self._values = self.payload.view(ml_dtypes.bfloat16)

    @property
    def nbytes(self) -> int:
        """Memory of both arenas."""
        return 4 * self._total

    def value(self, row: int) -> Floats:
        """A copy of the row's current value."""
        begin = self._begin(row)
        value: Floats = self._values[begin : begin + int(self.lengths[row])].astype(np.float32)
        return value

    def set(self, row: int, values: Floats, start: int = 0) -> None:
        """Replace the row's current value, from element ``start`` on; rounded to nearest, and finite."""
        begin = self._begin(row) + start
        self._values[begin : begin + len(values)] = np.clip(values, -_LARGEST, _LARGEST)
