"""Lists that lie in flat arrays, on either side: whether they may be touched, and which part of an array travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import Call, Parameter
from gradcomp.kernels.cuda.twins import is_twin
from gradcomp.kernels.reference_indices import _check_aligned
from gradcomp.kernels.segments import check_array

Numbers = npt.NDArray[np.int64]


def check_flat(name: str, array: Any, dtype: Any, *, writable: bool = False) -> None:
    """Raise TypeError unless it is a contiguous, aligned vector of `dtype`, of the host or the device."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        check_array(name, array, dtype, writable=writable)
        _check_aligned(**{name: array})
        return
    dtype = np.dtype(dtype)
    address, read_only = interface["data"]
    strides = interface.get("strides")
    if not (
        np.dtype(interface["typestr"]) == dtype
        and len(interface["shape"]) == 1
        and (strides is None or tuple(strides) == (dtype.itemsize,))
        and address % dtype.itemsize == 0
        and not (read_only and writable)
    ):
        raise TypeError(f"{name} must be a contiguous one-dimensional array of {dtype}")


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays may share memory, on whichever side they lie: no address is one of both sides."""
    (begin, end), (other, other_end) = _bounds(a), _bounds(b)
    return begin < other_end and other < end


def _bounds(array: Any) -> tuple[int, int]:
    if is_twin(array):
        return array.address, array.address + array.nbytes
    interface = None if type(array) is np.ndarray else getattr(array, "__cuda_array_interface__", None)
    begin = int((array.__array_interface__ if interface is None else interface)["data"][0])
    return begin, begin + array.nbytes


def lists_to_read(call: Call, array: Any, begins: Numbers, sizes: Numbers) -> Parameter:
    """Address of the array's first item; of the host's arrays only what the lists lie in goes up."""
    if hasattr(array, "__cuda_array_interface__"):
        return call.give(array)
    first, end = _span(begins, sizes)
    return call.give(array[first:end]).part(-first * array.itemsize) if end > first else 0


def lists_to_write(
    call: Call, array: Any, begins: Numbers, sizes: Numbers, *, all_of_it: bool = True
) -> Parameter:
    """As `lists_to_read`; goes up only if something in between stays, or not all of the lists is written."""
    if hasattr(array, "__cuda_array_interface__"):
        return call.result(array)
    first, end = _span(begins, sizes)
    if end == first:
        return 0
    order = np.argsort(begins[sizes > 0], kind="stable")
    begins, sizes = begins[sizes > 0][order], sizes[sizes > 0][order]
    gapless = all_of_it and bool((begins[1:] == begins[:-1] + sizes[:-1]).all())
    span = array[first:end]
    return (call.result(span) if gapless else call.update(span)).part(-first * array.itemsize)


def _span(begins: Numbers, sizes: Numbers) -> tuple[int, int]:
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    return (int(begins.min()), int((begins + sizes).max())) if len(sizes) else (0, 0)
