"""State and working memory on a device, which the host reads and writes by copies through pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcomp.core.vectors import Floats, Indices, Vector
from gradcomp.kernels.cuda.driver import Block, Bytes, Driver

_PIECE_BYTES = 1 << 25  # pinned memory that a copy takes at a time


class DeviceVector(Vector):
    """A :class:`gradcomp.core.vectors.Vector` in memory of a device. Reads and writes wait for its stream."""

    def __init__(self, driver: Driver, block: Block, begin: int, size: int) -> None:
        self._driver, self._block, self._begin = driver, block, begin
        self.size = size
        self.address = block.address + 4 * begin

    @staticmethod
    def zeros(driver: Driver, size: int) -> DeviceVector:
        """Returns a new vector of zeros."""
        block = driver.allocate(max(4 * size, 1))
        driver.zero(block.address, 4 * size)
        return DeviceVector(driver, block, 0, size)

    @property
    def memory(self) -> DeviceVector:
        """Returns the vector itself, which kernels find by its address."""
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Returns CUDA's array interface, version 3."""
        return {"shape": (self.size,), "typestr": "<f4", "data": (self.address, False), "version": 3}

    def __len__(self) -> int:
        return self.size

    @property
    def itemsize(self) -> int:
        return 4

    @property
    def nbytes(self) -> int:
        return 4 * self.size

    def read(self, begin: int = 0, end: int | None = None) -> Floats:
        values = self._copied(begin, self.size if end is None else end)
        values.flags.writeable = False
        return values

    def write(self, values: Floats, begin: int = 0) -> None:
        assert begin + len(values) <= self.size, f"{len(values)} values at {begin} of {self.size}"
        source = np.ascontiguousarray(values, np.float32).view(np.uint8)
        for at in range(0, source.nbytes, _PIECE_BYTES):
            staged = self._driver.pinned(min(_PIECE_BYTES, source.nbytes - at))
            staged[:] = source[at : at + staged.nbytes]
            self._driver.upload(self.address + 4 * begin + at, staged)
            self._driver.synchronize()

    def take(self, places: Indices) -> Floats:
        """Takes one copy, from the first to the last place."""
        if not len(places):
            return np.zeros(0, np.float32)
        low = int(places.min())
        taken: Floats = np.take(self._copied(low, int(places.max()) + 1), places - low)
        return taken

    def put(self, places: Indices, values: Floats) -> None:
        """Takes two copies, from the first to the last place: the elements between are written back unchanged."""
        if len(places):
            low = int(places.min())
            span = self._copied(low, int(places.max()) + 1)
            span[places - low] = values
            self.write(span, low)

    def part(self, begin: int, end: int) -> Vector:
        return DeviceVector(self._driver, self._block, self._begin + begin, end - begin)

    def _copied(self, begin: int, end: int) -> Floats:
        assert 0 <= begin <= end <= self.size, f"{begin} to {end} of {self.size}"
        values = np.empty(end - begin, np.float32)
        read_bytes(self._driver, self.address + 4 * begin, values.view(np.uint8))
        return values


def read_bytes(driver: Driver, address: int, target: Bytes) -> None:
    """Copies from the device to memory that need not be pinned, and waits."""
    for at in range(0, target.nbytes, _PIECE_BYTES):
        staged = driver.pinned(min(_PIECE_BYTES, target.nbytes - at))
        driver.download(staged, address + at)
        driver.synchronize()
        target[at : at + staged.nbytes] = staged
