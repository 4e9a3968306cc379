"""float32 memory for kernels, on the host or a GPU, which this process accesses by explicit copies only."""

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
    """A vector of ``size`` elements at ``address``, which kernels can access."""

    size: int
    address: int

    @property
    @abstractmethod
    def memory(self) -> Any:
        """Returns the elements as the array that kernels take; on a GPU only kernels may access it."""

    @abstractmethod
    def read(self, begin: int = 0, end: int | None = None) -> Floats:
        """Returns elements ``begin`` to ``end``, read-only; a copy on a GPU, the memory itself on the host."""

    @abstractmethod
    def write(self, values: Floats, begin: int = 0) -> None:
        """Replaces the elements from ``begin`` on."""

    @abstractmethod
    def take(self, places: Indices) -> Floats:
        """Returns a copy of the elements at ``places``."""

    @abstractmethod
    def put(self, places: Indices, values: Floats) -> None:
        """Replaces the elements at ``places``, which are all different."""

    @abstractmethod
    def part(self, begin: int, end: int) -> Vector:
        """Returns a vector of the same memory, from ``begin`` to ``end``."""


#: Allocates a vector of zeros of this size.
Zeros = Callable[[int], Vector]


class HostVector(Vector):
    """A vector over an array of this process; float32, flat and contiguous."""

    def __init__(self, values: Floats) -> None:
        self._values = values
        self.size = values.size
        self.address = int(values.ctypes.data)

    @property
    def memory(self) -> Floats:
        return self._values

    def read(self, begin: int = 0, end: int | None = None) -> Floats:
        """Returns a read-only view, not a copy: it shows later writes."""
        view = self._values[begin:end]
        view.flags.writeable = False
        return view

    def write(self, values: Floats, begin: int = 0) -> None:
        self._values[begin : begin + len(values)] = values

    def take(self, places: Indices) -> Floats:
        taken: Floats = np.take(self._values, places)
        return taken

    def put(self, places: Indices, values: Floats) -> None:
        self._values[places] = values

    def part(self, begin: int, end: int) -> Vector:
        return HostVector(self._values[begin:end])


def host_zeros(size: int) -> Vector:
    """Returns zeros in host memory that begin at a cache line."""
    padded = np.zeros(size + LINE, np.float32)
    start = -(padded.ctypes.data // 4) % LINE
    return HostVector(padded[start : start + size])
