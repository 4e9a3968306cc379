"""Messages whose coded part stays on the device, while this program reads and writes the rest of them on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.driver import Block, Driver
from gradcomp.kernels.cuda.vectors import read_bytes

#: Where parts of an array begin and end, ascending.
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Whole:
    """What a device mirror and its views are parts of: memory on both sides."""

    driver: Driver
    block: Block
    begin: int
    nbytes: int
    host: Spans


class DeviceMirror(np.ndarray[Any, np.dtype[Any]]):
    """A contiguous array of the host, and as many bytes of a device; views of it are mirrors too, copies are not.

    The parts that ``host_parts`` lists hold on the host: headers, which this program writes and reads. All else holds
    on the device and is garbage here: kernels and transports that find a ``__cuda_array_interface__`` work on it there.
    """

    _whole: _Whole | None = None
    _address: int | None = None  # once it has been asked for; a view has its own

    def __array_finalize__(self, made_from: Any) -> None:
        """Of views too."""
        self._whole = getattr(made_from, "_whole", None)

    def _place(self) -> tuple[_Whole, int]:
        """The whole, and where in it this begins; AttributeError for a copy."""
        whole = self._whole
        if whole is not None:
            offset = int(self.__array_interface__["data"][0]) - whole.begin
            if 0 <= offset <= whole.nbytes - self.nbytes:
                return whole, offset
        raise AttributeError("a copy of a device mirror has no memory on the device")

    @property
    def address(self) -> int:
        """Of its bytes on the device."""
        if self._address is None:
            whole, offset = self._place()
            self._address = whole.block.address + offset
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See CUDA's array interface, version 3."""
        address = self.address
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (address, False), "version": 3}

    def host_parts(self) -> list[tuple[npt.NDArray[np.uint8], int]]:
        """The parts that hold on the host, as bytes, each with the address of its bytes on the device."""
        whole, begin = self._place()
        end, flat = begin + self.nbytes, self.reshape(-1).view(np.uint8)
        parts = [(max(a, begin) - begin, min(b, end) - begin) for a, b in whole.host if a < end and b > begin]
        return [(flat[a:b], whole.block.address + begin + a) for a, b in parts]


def mirror(driver: Driver, nbytes: int, host: Spans) -> DeviceMirror:
    """Zeros on both sides. ``host``: the parts that hold on the host, where only they take memory, page by page."""
    block = driver.allocate(max(nbytes, 1))
    driver.zero(block.address, nbytes)
    driver.synchronize()
    made: DeviceMirror = np.zeros(nbytes, dtype=np.uint8).view(DeviceMirror)
    made._whole = _Whole(driver, block, int(made.ctypes.data), nbytes, tuple(host))
    return made


def address_of(array: npt.NDArray[Any]) -> int:
    """Where its bytes hold, for tables that are to refer to them; of all of a device mirror."""
    return array.address if is_mirror(array) else int(array.ctypes.data)


def fill(array: npt.NDArray[Any], value: float) -> None:
    """Set all elements, on whichever side they hold."""
    if not is_mirror(array):
        array.fill(value)
        return
    driver = array._place()[0].driver
    staged = driver.pinned(array.nbytes)
    staged.view(array.dtype).fill(value)
    driver.upload(array.address, staged)
    driver.synchronize()


def fetch(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """Copy a mirror's bytes, without the host's headers, from the device to as many of the host, and wait."""
    assert is_mirror(source), "what is fetched lies on a device"
    read_bytes(source._place()[0].driver, source.address, target)


def is_mirror(array: Any) -> TypeGuard[DeviceMirror]:
    """Whether its bytes are on a device, all but some; a copy's are not."""
    return isinstance(array, DeviceMirror) and (array._address is not None or hasattr(array, "address"))
