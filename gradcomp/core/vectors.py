"""float32 memory for kernels, the host's or a GPU's: this program reads and writes it by explicit copies alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

LINE = 16  # float32 elements of a cache line


class Vector(ABC):
    """``size`` elements from ``address`` on, where kernels reach them."""

    size: int
    address: int

    @property
    @abstractmethod
    def memory(self) -> Any:
        """The elements as kernels take an array of them: the memory itself, which on a GPU kernels alone may touch."""

    @abstractmethod
    def read(self, begin: int = 0, end: int | None = None) -> Floats:
        """Elements ``begin`` to ``end``, read-only; a GPU's are copied, the host's are the memory itself."""

    @abstractmethod
    def write(self, values: Floats, begin: int = 0) -> None:
        """Replace the elements from ``begin`` on."""

    @abstractmethod
    def take(self, places: Indices) -> Floats:
        """A copy of the elements at ``places``."""

    @abstractmethod
    def put(self, places: Indices, values: Floats) -> None:
        """Replace the elements at ``places``, none of which is named twice."""

    @abstractmethod
    def part(self, begin: int, end: int) -> Vector:
        """The same memory, from ``begin`` to ``end``."""


#: Makes a vector of so many zeros.
Zeros = Callable[[int], Vector]


class HostVector(Vector):
    """An array of this process, used where it lies; float32, flat and contiguous."""

    def __init__(self, values: Floats) -> None:
        self._values = values
        self.size = values.size
        self.address = int(values.ctypes.data)

    @property
    def memory(self) -> Floats:
        """See :class:`Vector`."""
        return self._values

    def read(self, begin: int = 0, end: int | None = None) -> Floats:
        """No copy: it shows what is written later."""
        view = self._values[begin:end]
        view.flags.writeable = False
        return view

    def write(self, values: Floats, begin: int = 0) -> None:
        """See :class:`Vector`."""
        self._values[begin : begin + len(values)] = values

    def take(self, places: Indices) -> Floats:
        """See :class:`Vector`."""
        taken: Floats = np.take(self._values, places)
        return taken

    def put(self, places: Indices, values: Floats) -> None:
        """See :class:`Vector`."""
        self._values[places] = values

    def part(self, begin: int, end: int) -> Vector:
        """See :class:`Vector`."""
        return HostVector(self._values[begin:end])


def host_zeros(size: int) -> Vector:
    """Zeros in this process's memory, from a cache line on."""
    padded = np.zeros(size + LINE, np.float32)
    start = -(padded.ctypes.data // 4) % LINE
    return HostVector(padded[start : start + size])
