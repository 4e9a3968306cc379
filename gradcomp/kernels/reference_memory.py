"""NumPy arrays of the memory that rows of a table refer to, and the order in which elements are added.

Every backend that is compared byte for byte adds in this order. Sums over a bucket, a layer or a column are float64:

    chunk     4,096 elements that follow each other; the last one may be shorter
    lane      element i of a chunk belongs to lane i mod 16; a lane starts at +0 and adds its elements in order
    in chunk  the 16 lanes become 8, 4, 2 and 1: lane k plus lane k + width, for the width 8, then 4, 2 and 1
    chunks    neighbours are added, chunk 2 k plus chunk 2 k + 1, until one sum is left; of an odd number the last
              stays as it is

A lane's sum is never -0, so that zeros in place of missing elements or chunks change nothing. Sixteen lanes fill
the vectors of a CPU; sixteen threads of a GPU add a chunk while others add the other chunks.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import DTYPES, FLOAT32, Floats

CHUNK: Final = 4096
"""The number of elements of a chunk."""
_LANES: Final = 16


def memory_at(address: int, length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns a writable array of ``length`` items at an address."""
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
    """Returns whether no value is infinite or NaN."""
    return bool(np.isfinite(values).all())


def ordered_sum(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Returns the sum of each row of a matrix, in float64 and in the order of this module."""
    rows, elements = x.shape
    chunks = max(-(-elements // CHUNK), 1)
    steps = -(-min(elements, CHUNK) // _LANES)
    strided = np.zeros((rows, chunks, steps, _LANES))
    strided.reshape(rows, -1)[:, :elements] = x
    lanes = np.zeros((rows, chunks, _LANES))
    for step in range(steps):
        lanes += strided[:, :, step]
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    sums = lanes[..., 0]
    while sums.shape[1] > 1:
        if sums.shape[1] % 2:
            sums = np.concatenate((sums, np.zeros((rows, 1))), axis=1)
        sums = sums[:, 0::2] + sums[:, 1::2]
    total: npt.NDArray[np.float64] = sums[:, 0]
    return total
