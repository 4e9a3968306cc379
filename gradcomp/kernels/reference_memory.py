"""What the rows of a table refer to, as NumPy arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import DTYPES, FLOAT32

Floats = npt.NDArray[np.float32]


def memory_at(address: int, length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """So many items at an address, to be read and written."""
    if length == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * (int(length) * dtype.itemsize)).from_address(int(address))
    view: npt.NDArray[Any] = np.frombuffer(memoryview(memory).cast("B"), np.uint8).view(dtype)
    return view


def gradient_of(segment: np.void, number: Any) -> npt.NDArray[Any]:
    """To be read only: it may be the gradient itself."""
    if not segment["gradient"]:
        return np.zeros(int(segment["length"]), number)
    return memory_at(segment["gradient"], segment["length"], DTYPES[segment["dtype"]]).astype(
        number, copy=False
    )


def residual_of(segment: np.void) -> Floats:
    """To be read only."""
    return memory_at(segment["residual"], segment["length"], DTYPES[FLOAT32])


def next_residual_of(segment: np.void) -> Floats:
    """To be written, and read by those that find a contribution there."""
    return memory_at(segment["next_residual"], segment["length"], DTYPES[FLOAT32])


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Whether no value is infinite or NaN."""
    return bool(np.isfinite(values).all())
