"""NumPy arrays of the memory that rows of a table refer to."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import DTYPES, FLOAT32

Floats = npt.NDArray[np.float32]


def memory_at(address: int, length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns an array of so many items at an address, to be read and written."""
    if length == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * (int(length) * dtype.itemsize)).from_address(int(address))
    view: npt.NDArray[Any] = np.frombuffer(memoryview(memory).cast("B"), np.uint8).view(dtype)
    return view


def gradient_of(segment: np.void, number: Any) -> npt.NDArray[Any]:
    """Returns the gradient as ``number``; read-only by convention, as it may be the gradient itself."""
    if not segment["gradient"]:
        return np.zeros(int(segment["length"]), number)
    return memory_at(segment["gradient"], segment["length"], DTYPES[segment["dtype"]]).astype(
        number, copy=False
    )


def residual_of(segment: np.void) -> Floats:
    """Returns the residual; read-only by convention."""
    return memory_at(segment["residual"], segment["length"], DTYPES[FLOAT32])


def next_residual_of(segment: np.void) -> Floats:
    """Returns the next residual, to be written; some kernels read a contribution from it."""
    return memory_at(segment["next_residual"], segment["length"], DTYPES[FLOAT32])


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Tells whether no value is infinite or NaN."""
    return bool(np.isfinite(values).all())
