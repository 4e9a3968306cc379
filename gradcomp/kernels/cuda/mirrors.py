"""The memory of messages for gradients on a device.

A mirror's payload stays on the device, and the host reads and writes its headers. A pinned message is memory of the
host that the device copies from and to, so that the CPU copies no payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.driver import Block, Driver
from gradcomp.kernels.cuda.vectors import read_bytes

#: Begin and end of parts of an array, ascending.
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Whole:
    """The memory on both sides that a device mirror and its views are parts of."""

    driver: Driver
    block: Block
    begin: int
    nbytes: int
    host: Spans


class DeviceMirror(np.ndarray[Any, np.dtype[Any]]):
    """A contiguous array of the host with as many bytes on a device; views of it are mirrors too, copies are not.

    The host's bytes are valid in the parts of ``host_parts``: headers, which this program writes and reads. All other
    bytes are valid on the device and garbage on the host: kernels and transports that find a
    ``__cuda_array_interface__`` work on them there.
    """

    _whole: _Whole | None = None
    _address: int | None = None  # computed at the first use; a view has its own

    def __array_finalize__(self, made_from: Any) -> None:
        self._whole = getattr(made_from, "_whole", None)

    def _place(self) -> tuple[_Whole, int]:
        """Returns the whole, and this array's offset in it; AttributeError for a copy."""
        whole = self._whole
        if whole is not None:
            offset = int(self.__array_interface__["data"][0]) - whole.begin
            if 0 <= offset <= whole.nbytes - self.nbytes:
                return whole, offset
        raise AttributeError("a copy of a device mirror has no memory on the device")

    @property
    def address(self) -> int:
        """Returns the address of the bytes on the device."""
        if self._address is None:
            whole, offset = self._place()
            self._address = whole.block.address + offset
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Returns CUDA's array interface, version 3."""
        address = self.address
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (address, False), "version": 3}

    def host_parts(self) -> list[tuple[npt.NDArray[np.uint8], int]]:
        """Returns the parts that are valid on the host, as bytes, each with its address on the device."""
        whole, begin = self._place()
        end, flat = begin + self.nbytes, self.reshape(-1).view(np.uint8)
        parts = [(max(a, begin) - begin, min(b, end) - begin) for a, b in whole.host if a < end and b > begin]
        return [(flat[a:b], whole.block.address + begin + a) for a, b in parts]


def mirror(driver: Driver, nbytes: int, host: Spans) -> DeviceMirror:
    """Returns zeros on both sides; the host takes memory, page by page, only for the parts ``host``, valid there."""
    block = driver.allocate(max(nbytes, 1))
    driver.zero(block.address, nbytes)
    driver.synchronize()
    made: DeviceMirror = np.zeros(nbytes, dtype=np.uint8).view(DeviceMirror)
    made._whole = _Whole(driver, block, int(made.ctypes.data), nbytes, tuple(host))
    return made


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's valid bytes, for tables that refer to them; for a mirror that on the device."""
    return array.address if is_mirror(array) else int(array.ctypes.data)


def fill(array: npt.NDArray[Any], value: float) -> None:
    """Sets all elements, on the side where they are valid."""
    if not is_mirror(array):
        array.fill(value)
        return
    driver = array._place()[0].driver
    staged = driver.pinned(array.nbytes)
    staged.view(array.dtype).fill(value)
    driver.upload(array.address, staged)
    driver.synchronize()


def fetch(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """Copies a mirror's bytes, without the host's headers, from the device to host memory of that size, and waits."""
    assert is_mirror(source), "only a device's bytes are fetched"
    read_bytes(source._place()[0].driver, source.address, target)


def is_mirror(array: Any) -> TypeGuard[DeviceMirror]:
    """Returns whether an array is a mirror, whose bytes are on a device; a copy of one is not."""
    return isinstance(array, DeviceMirror) and (array._address is not None or hasattr(array, "address"))


class PinnedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in pinned memory; views of it are in it too, copies are not."""

    _memory: tuple[int, int] = 0, 0  # where it begins and ends

    def __array_finalize__(self, made_from: Any) -> None:
        self._memory = getattr(made_from, "_memory", (0, 0))


def pinned(driver: Driver, nbytes: int, headers: Spans) -> PinnedArray:  # noqa: ARG001 - all is on the host
    """Returns zeros for messages that a device's kernels access; a :data:`gradcomp.transport.base.Allocator`."""
    made = driver.pinned(nbytes).view(PinnedArray)
    made.fill(0)
    begin = int(made.ctypes.data)
    made._memory = begin, begin + nbytes
    return made


def is_pinned(array: Any) -> bool:
    """Returns whether all of an array is in memory that :func:`pinned` returned."""
    if not isinstance(array, PinnedArray):
        return False
    first, last = array._memory
    begin = int(array.__array_interface__["data"][0])
    return first <= begin and begin + array.nbytes <= last
