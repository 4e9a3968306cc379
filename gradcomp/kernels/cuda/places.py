"""The parts of flat arrays that a kernel call reads and writes, on either side, with the checks of them.

Of arrays on the host only the parts that rows, lists or factors cover are copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Call, Parameter, Sizes
from gradcomp.kernels.cuda.mirrors import is_mirror
from gradcomp.kernels.reference_indices import check_aligned
from gradcomp.kernels.segments import check_array


def described(array: Any) -> Any:
    """Returns a device array as a NumPy array of its address, whose contents are not to be read; others unchanged."""
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


def check_flat(name: str, array: Any, dtype: Any, *, writable: bool = False) -> None:
    """Raises TypeError unless it is a contiguous, aligned vector of `dtype`, of the host or the device."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        check_array(name, array, dtype, writable=writable)
        check_aligned(**{name: array})
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
    """Tells whether two arrays may share memory; the host and devices have no addresses in common."""
    return overlap_any(a, (b,))


def overlap_any(a: Any, others: Sequence[Any]) -> bool:
    """Tells whether an array may share memory with one of the others."""
    begin, end = _bounds(a)
    return any(begin < other_end and other < end for other, other_end in map(_bounds, others))


def _bounds(array: Any) -> tuple[int, int]:
    if is_mirror(array):
        return array.address, array.address + array.nbytes
    interface = None if type(array) is np.ndarray else getattr(array, "__cuda_array_interface__", None)
    begin = int((array.__array_interface__ if interface is None else interface)["data"][0])
    return begin, begin + array.nbytes


def ends(begins: Sizes, sizes: Sizes) -> tuple[int, int]:
    """Returns the beginning of the first item and the end of the last one."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    return (int(begins.min()), int((begins + sizes).max())) if len(sizes) else (0, 0)


def spans(begins: Sizes, sizes: Sizes) -> list[tuple[int, int]]:
    """Returns begin and end of rows, ascending; adjacent rows are joined."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    if not len(begins):
        return []
    order = np.argsort(begins, kind="stable")
    begins, behind = begins[order], (begins + sizes)[order]
    first = np.flatnonzero(np.append(True, begins[1:] != behind[:-1]))
    last = np.append(first[1:], len(begins)) - 1
    return list(zip(begins[first].tolist(), behind[last].tolist(), strict=True))


def to_read(call: Call, array: Any, number: int, begins: Sizes, sizes: Sizes) -> Parameter:
    """Registers lists of a run's array that are read; of the host's array only the part that they cover is copied."""
    first, end = ends(begins, sizes)
    return call.read(array, number, first * array.itemsize, end * array.itemsize) if end > first else 0


def to_write(
    call: Call, array: Any, number: int, begins: Sizes, sizes: Sizes, *, all_of_it: bool = True
) -> Parameter:
    """Registers lists of a run's array that are written; unless ``all_of_it`` is, they are copied up as well."""
    first, end = ends(begins, sizes)
    if end == first:
        return 0
    if not all_of_it:
        return call.change(array, number, [(first * array.itemsize, end * array.itemsize)])
    return call.write(array, number, spans(begins * array.itemsize, sizes * array.itemsize))
