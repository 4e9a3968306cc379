"""Messages in pinned memory of the host, to and from which a device copies directly."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.mirrors import Spans


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
    """Tells whether all of an array is in memory that :func:`pinned` returned."""
    if not isinstance(array, PinnedArray):
        return False
    first, last = array._memory
    begin = int(array.__array_interface__["data"][0])
    return first <= begin and begin + array.nbytes <= last
