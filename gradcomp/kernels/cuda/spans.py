"""What a kernel call reads and writes of a flat array: host arrays travel only as far as rows reach into them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Sizes


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


def ends(begins: Sizes, sizes: Sizes) -> tuple[int, int]:
    """Where the first of some items begins, and where the last one ends."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    return (int(begins.min()), int((begins + sizes).max())) if len(sizes) else (0, 0)


def spans(begins: Sizes, sizes: Sizes) -> list[tuple[int, int]]:
    """Where rows lie, ascending; neighbours are one."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    if not len(begins):
        return []
    order = np.argsort(begins, kind="stable")
    begins, behind = begins[order], (begins + sizes)[order]
    first = np.flatnonzero(np.append(True, begins[1:] != behind[:-1]))
    last = np.append(first[1:], len(begins)) - 1
    return list(zip(begins[first].tolist(), behind[last].tolist(), strict=True))
