"""Rows of bfloat16, which take 4 bytes per element for a current and a next value."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradcomp.core.rows import Rows
from gradcomp.core.vectors import LINE, Floats, host_zeros

_LARGEST = np.float32(2.0**128 - 2.0**120)


class Bfloat16Buffer(Rows):
    """Rows of bfloat16 in host memory, which start at zero. Values go in and out as float32.

    A step rounds next values stochastically, see :mod:`gradcomp.pipeline.widened`. :meth:`set` rounds to nearest: it is
    used when rows move, and rounding to nearest does not change values that were rows before.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths, 2 * LINE)
        #: Both arenas as bytes, which kernels take as a payload; an element has two bytes.
        self.payload: npt.NDArray[np.uint8] = host_zeros(self._total).memory.view(np.uint8)
        self._values = self.payload.view(ml_dtypes.bfloat16)

    @property
    def nbytes(self) -> int:
        return 4 * self._total

    def value(self, row: int) -> Floats:
        """Returns a copy of the row's current value."""
        begin = self._begin(row)
        value: Floats = self._values[begin : begin + int(self.lengths[row])].astype(np.float32)
        return value

    def set(self, row: int, values: Floats, start: int = 0) -> None:
        """Replaces the row's current value from element ``start`` on; rounds to nearest, and to finite values."""
        begin = self._begin(row) + start
        self._values[begin : begin + len(values)] = np.clip(values, -_LARGEST, _LARGEST)
