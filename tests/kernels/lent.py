"""A framework's memory on the device: CuPy's arrays, and what tests reach at the same address as kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def there(array: Any) -> Any:
    """A copy on the device."""
    import cupy

    found = cupy.asarray(array)
    cupy.cuda.get_current_stream().synchronize()
    return found


def back(array: Any) -> Any:
    """A copy on the host; the kernels' calls have waited for their stream."""
    import cupy

    return cupy.asnumpy(array)


def shared(driver: Any, size: int, dtype: Any = np.float32) -> Any:
    """Zeros that kernels and the test reach; of a GPU managed memory, while no kernel runs."""
    dtype = np.dtype(dtype)
    nbytes = size * dtype.itemsize
    if hasattr(driver, "shared"):
        return driver.shared(nbytes).view(dtype)
    import cupy

    memory = cupy.cuda.malloc_managed(max(nbytes, 1))
    whole: Any = (ctypes.c_uint8 * max(nbytes, 1)).from_address(memory.ptr)
    whole.memory = memory  # lives as long as any view of it
    view = np.frombuffer(whole, np.uint8)[:nbytes]
    view[:] = 0
    return view.view(dtype)
