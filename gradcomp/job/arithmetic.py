"""Defines the arithmetic of the user's reductions: the dtype in which values are combined, scaled and divided.

Float16 and bfloat16 are combined in float32, float32 and float64 in their own dtype. Integers of up to 64 bits are
combined in int64, uint64 in uint64, and overflow wraps around. Integers are scaled in float64, and a scaled value or an
average that is not whole is truncated towards zero. For bool, Sum and Max are "or", Product and Min "and". A NaN of any
rank makes the minimum and the maximum NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradcomp.job.reduce_op import ReduceOp, ScaledOp

Array = npt.NDArray[Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name, including bfloat16."""
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are combined."""
    if dtype.kind in "iu":
        return dtype if dtype == np.uint64 else np.dtype(np.int64)
    return np.dtype(np.float32) if dtype in (np.float16, _BFLOAT16) else dtype


def added_by_transport(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Return whether the transport's own sum computes this operation in this dtype."""
    return op in (ReduceOp.AVERAGE, ReduceOp.SUM) and dtype in (np.float32, np.float64, np.int64)


def combine(parts: Sequence[Array], how: ScaledOp) -> Array:
    """Combine ``parts``, one array from each rank, in rank order. Return a new array of their dtype."""
    dtype, ufunc = parts[0].dtype, _UFUNCS[how.op]
    with np.errstate(over="ignore", invalid="ignore"):
        total = prescaled(parts[0], how)
        for part in parts[1:]:
            ufunc(total, prescaled(part, how), out=total)
        return finished(total, how, len(parts)).astype(dtype, copy=False)


def prescaled(values: Array, how: ScaledOp) -> Array:
    """Return a copy in the wide dtype, multiplied by the prescale factor."""
    if values.dtype.kind in "iu":
        # The product is cast to the given dtype first, as if the user had scaled it.
        values = _times(values, how.prescale)
        return values.astype(wide(values.dtype))
    return _times(values.astype(wide(values.dtype)), how.prescale)


def finished(total: Array, how: ScaledOp, size: int) -> Array:
    """Divide the combined values by the number of ranks for an average, and multiply by the postscale factor.

    Floats are changed in place.
    """
    if how.op is not ReduceOp.AVERAGE:
        return _times(total, how.postscale)
    if total.dtype.kind == "f":
        return _times(np.divide(total, size, out=total), how.postscale)
    if how.postscale != 1.0:
        return _times(total, how.postscale / size)
    # An average is truncated towards zero, but NumPy's division rounds down.
    whole, rest = np.divmod(total, size)
    return np.asarray(whole + ((rest != 0) & (total < 0)))


def _times(values: Array, factor: float) -> Array:
    """Multiply: floats in place, integers in float64, truncated towards zero."""
    if factor == 1.0:
        return values
    if values.dtype.kind == "f":
        np.multiply(values, values.dtype.type(factor), out=values)
        return values
    return np.asarray(np.trunc(values.astype(np.float64) * factor)).astype(values.dtype)
