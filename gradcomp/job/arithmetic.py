"""The arithmetic of the user's reductions: in which dtype ranks' values are combined, scaled and divided.

Float16 and bfloat16 are combined in float32, float32 and float64 in themselves. Integers of up to 64 bits are combined
in int64, uint64 in itself: what does not fit wraps. Factors of integers are applied in float64, and a value that is not
whole loses its fraction, as does the average of integers. Of bool, Sum and Max are "or", Product and Min "and". A NaN
of any rank is in the minimum and the maximum.
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
    """The dtype of that name; bfloat16 is one."""
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of ``dtype`` are combined."""
    if dtype.kind in "iu":
        return dtype if dtype == np.uint64 else np.dtype(np.int64)
    return np.dtype(np.float32) if dtype in (np.float16, _BFLOAT16) else dtype


def added_by_transport(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Whether the transport's own sum is this operation of these values."""
    return op in (ReduceOp.AVERAGE, ReduceOp.SUM) and dtype in (np.float32, np.float64, np.int64)


def combine(parts: Sequence[Array], how: ScaledOp) -> Array:
    """One value from every rank's, a row of ``parts`` each: a new array of their dtype, combined in rank order."""
    dtype, ufunc = parts[0].dtype, _UFUNCS[how.op]
    with np.errstate(over="ignore", invalid="ignore"):
        total = prescaled(parts[0], how)
        for part in parts[1:]:
            ufunc(total, prescaled(part, how), out=total)
        return finished(total, how, len(parts)).astype(dtype, copy=False)


def prescaled(values: Array, how: ScaledOp) -> Array:
    """A copy in the wide dtype, times the prescale factor."""
    if values.dtype.kind in "iu":  # rounded to what the dtype holds, as if it had been given so
        values = _times(values, how.prescale)
        return values.astype(wide(values.dtype))
    return _times(values.astype(wide(values.dtype)), how.prescale)


def finished(total: Array, how: ScaledOp, size: int) -> Array:
    """Of the combined values: divided by the number of ranks for the average, times the postscale factor."""
    if how.op is not ReduceOp.AVERAGE:
        return _times(total, how.postscale)
    if total.dtype.kind == "f":
        return _times(np.divide(total, size, out=total), how.postscale)
    if how.postscale != 1.0:
        return _times(total, how.postscale / size)
    # Division towards zero; NumPy's rounds down.
    whole, rest = np.divmod(total, size)
    return np.asarray(whole + ((rest != 0) & (total < 0)))


def _times(values: Array, factor: float) -> Array:
    """In place for floats; integers are multiplied in float64 and lose their fraction."""
    if factor == 1.0:
        return values
    if values.dtype.kind == "f":
        np.multiply(values, values.dtype.type(factor), out=values)
        return values
    return np.asarray(np.trunc(values.astype(np.float64) * factor)).astype(values.dtype)
