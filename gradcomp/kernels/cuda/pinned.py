"""Messages in pinned memory of the host: a device copies from there and to there, and the CPU copies nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.mirrors import Spans


class PinnedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in pinned memory; views of it are in it too, copies are not."""

    _memory: tuple[int, int] = 0, 0  # where it begins and ends

    def __array_finalize__(self, made_from: Any) -> None:
        """Of views too."""
        self._memory = getattr(made_from, "_memory", (0, 0))


def pinned(driver: Driver, nbytes: int, headers: Spans) -> PinnedArray:  # noqa: ARG001 - it is all one here
    """Zeros for messages that a device's kernels read and write. See :data:`gradcomp.transport.base.Allocator`."""
    made = driver.pinned(nbytes).view(PinnedArray)
    made.fill(0)
    begin = int(made.ctypes.data)
    made._memory = begin, begin + nbytes
    return made


def is_pinned(array: Any) -> bool:
    """Whether all of an array is in memory that :func:`pinned` gave."""
    if not isinstance(array, PinnedArray):
        return False
    first, last = array._memory
    begin = int(array.__array_interface__["data"][0])
    return first <= begin and begin + array.nbytes <= last
