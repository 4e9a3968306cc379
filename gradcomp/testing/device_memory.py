"""Memory that kernels of a device and this process can access at the same address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def shared(driver: Any, size: int, dtype: Any = np.float32) -> Any:
    """Returns zeros that a device's kernels and this process can access.

    A GPU's are managed memory, which this process may access only while no kernel runs.
    """
    dtype = np.dtype(dtype)
    nbytes = size * dtype.itemsize
    if hasattr(driver, "shared"):
        return driver.shared(nbytes).view(dtype)
    import cupy

    memory = cupy.cuda.malloc_managed(max(nbytes, 1))
    whole: Any = (ctypes.c_uint8 * max(nbytes, 1)).from_address(memory.ptr)
    whole.memory = memory  # keeps the memory alive as long as any view of it
    view = np.frombuffer(whole, np.uint8)[:nbytes]
    view[:] = 0
    return view.view(dtype)
