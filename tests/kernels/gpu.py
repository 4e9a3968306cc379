"""Whether the kernels can run on a GPU here."""

from __future__ import annotations

import importlib
from functools import cache


@cache
def problem() -> str | None:
    """What is missing, or None."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device ({error})"
    return None if count else "no CUDA device"
