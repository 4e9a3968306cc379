"""Computes reductions over ranks in NumPy, and makes numbers to reduce."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gradcomp.job.reduce_op import Average, Max, Min, Product, Sum

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
SHAPES = ((), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4))
UFUNCS = {Average: operator.add, Sum: operator.add, Product: operator.mul, Min: np.minimum, Max: np.maximum}


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def values(dtype: str, shape: Sequence[int], rank: int) -> np.ndarray:
    """Returns numbers that differ between ranks and places."""
    drawn = np.random.default_rng([rank, *shape]).integers(0, 2 if dtype == "bool" else 7, size=shape)
    signed = dtype in FLOATS or dtype.startswith("int")
    return np.asarray(drawn - (3 if signed else 0)).astype(numpy_dtype(dtype))


def reduced(arrays: Sequence[np.ndarray], op: Any) -> np.ndarray:
    """Reduces in a wide type and rounds once, integers towards zero."""
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        both = np.logical_or if op in (Sum, Max) else np.logical_and
        return functools.reduce(both, arrays)
    wide = np.float64 if dtype == np.float64 else np.float32 if dtype.kind in "fV" else np.int64
    total = functools.reduce(UFUNCS[op], [array.astype(wide) for array in arrays])
    if op is Average:
        total = total / len(arrays) if wide is not np.int64 else np.trunc(total / len(arrays))
    return np.asarray(total).astype(dtype)


def ops_of(dtype: str) -> list[Any]:
    return [op for op in UFUNCS if not (dtype == "bool" and op is Average)]
