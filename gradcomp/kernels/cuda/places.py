"""Lists that lie in flat arrays, on either side: whether they may be touched, and which part of an array travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import Call, Parameter
from gradcomp.kernels.cuda.mirrors import is_mirror
from gradcomp.kernels.cuda.spans import ends, spans
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
    return overlap_any(a, (b,))


def overlap_any(a: Any, others: Sequence[Any]) -> bool:
    """Whether an array may share memory with one of the others."""
    begin, end = _bounds(a)
    return any(begin < other_end and other < end for other, other_end in map(_bounds, others))


def _bounds(array: Any) -> tuple[int, int]:
    if is_mirror(array):
        return array.address, array.address + array.nbytes
    interface = None if type(array) is np.ndarray else getattr(array, "__cuda_array_interface__", None)
    begin = int((array.__array_interface__ if interface is None else interface)["data"][0])
    return begin, begin + array.nbytes


def lists_to_read(call: Call, array: Any, number: int, begins: Numbers, sizes: Numbers) -> Parameter:
    """Where kernels find the first item of a run's array; of the host's only what the lists lie in goes up."""
    first, end = ends(begins, sizes)
    return call.read(array, number, first * array.itemsize, end * array.itemsize) if end > first else 0


def lists_to_write(
    call: Call, array: Any, number: int, begins: Numbers, sizes: Numbers, *, all_of_it: bool = True
) -> Parameter:
    """The same for lists that are written; they go up as well if not ``all_of_it`` is."""
    first, end = ends(begins, sizes)
    if end == first:
        return 0
    if not all_of_it:
        return call.change(array, number, [(first * array.itemsize, end * array.itemsize)])
    return call.write(array, number, spans(begins * array.itemsize, sizes * array.itemsize))
