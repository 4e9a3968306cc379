"""What a kernel call reads and writes of a flat array: host arrays travel only as far as rows reach into them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import Call, Parameter, Sizes


def described(array: Any) -> Any:
    """A device array as a NumPy array of its address, for checks only: nobody may look into it. Others as they are."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return array
    address, read_only = interface["data"]
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    memory = (ctypes.c_uint8 * (int(np.prod(shape)) * dtype.itemsize)).from_address(address or 1)
    view = np.ndarray(shape, dtype, buffer=memory)
    if strides is not None and tuple(strides) != view.strides:
        raise TypeError("arrays on a device must be contiguous")
    view.flags.writeable = not read_only
    return view


def read_span(call: Call, array: npt.NDArray[Any], begins: Sizes, sizes: Sizes) -> Parameter:
    """Where kernels find the items of an array, of which rows read `sizes` from `begins` on."""
    first, end = _ends(begins, sizes)
    if first == end:
        return 0
    if hasattr(array, "__cuda_array_interface__"):
        return call.give(array)
    return call.give(array[first:end]).part(-first * array.itemsize)


def write_span(
    call: Call, array: npt.NDArray[Any], begins: Sizes, sizes: Sizes, *, reads: bool = False
) -> Parameter:
    """The same for items that are written; they go up as well where there are gaps, or where kernels read them."""
    first, end = _ends(begins, sizes)
    if first == end:
        return 0
    if hasattr(array, "__cuda_array_interface__"):
        return call.update(array)
    span = array[first:end]
    whole = not reads and int(sizes.sum()) == end - first
    return (call.result(span) if whole else call.update(span)).part(-first * array.itemsize)


def _ends(begins: Sizes, sizes: Sizes) -> tuple[int, int]:
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    return (int(begins.min()), int((begins + sizes).max())) if len(sizes) else (0, 0)
