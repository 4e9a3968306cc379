"""Matrix products have the same bits on every machine, in whatever order its BLAS adds."""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: Whole numbers up to 2**53 in magnitude are exact in float64, and so is every sum below that.
_EXACT_BITS = 53
#: OpenBLAS uses one thread for products of at most so many multiply-adds.
_ONE_THREAD = 1 << 18
#: Products above it are worth several threads.
_SEVERAL_THREADS = 1 << 26
#: The function that returns the number of threads of NumPy's BLAS has one of these names.
_THREADS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)


@dataclass(frozen=True, eq=False)
class Whole:
    """Hold a factor: ``values`` are whole numbers of magnitude up to 2**``bits``, in units of ``unit``."""

    values: Doubles
    unit: float
    bits: int

    @property
    def T(self) -> Whole:
        return Whole(self.values.T, self.unit, self.bits)

    @property
    def terms(self) -> int:
        return int(max(self.values.shape))

    def first(self, columns: int) -> Whole:
        return Whole(self.values[:, :columns], self.unit, self.bits)

    def in_bits(self, bits: int) -> Whole:
        """Return the factor rounded once more, to at most ``bits`` bits."""
        fewer = self.bits - bits
        return self if fewer <= 0 else Whole(np.rint(self.values * 2.0**-fewer), self.unit * 2.0**fewer, bits)


def whole(values: Floats, terms: int) -> Whole:
    """Round to multiples of 2**(e - bits), where the largest magnitude is below 2**e.

    ``terms``: the bits are the most for which terms 2**(2 bits) stays below 2**53. NaN everywhere if a value is not
    finite.
    """
    bits = _bits(terms)
    largest = max(float(values.max(initial=0)), -float(values.min(initial=0)))
    if not math.isfinite(largest):
        return Whole(np.full(values.shape, np.nan), 1.0, bits)
    exponent = math.frexp(largest)[1] - bits
    if abs(exponent) > 100:  # beyond float32
        return Whole(np.rint(values.astype(np.float64) * 2.0**-exponent), 2.0**exponent, bits)
    found = values * np.float32(2.0**-exponent)
    return Whole(np.rint(found, out=found).astype(np.float64), 2.0**exponent, bits)


def product(a: Whole, b: Whole) -> Floats:
    """Return a b. Sums are exact, so that their order does not matter; each is rounded once, to float32.

    Factors of more bits than k terms allow are rounded once more: to 21 for k = 768. NaN everywhere if a factor is NaN.

    a: (m, k), b: (k, n). Returns (m, n), float32.
    """
    bits = _bits(a.values.shape[1])
    if a.bits + b.bits > 2 * bits:
        a, b = a.in_bits(bits), b.in_bits(bits)
    found = np.empty((len(a.values), b.values.shape[1]), np.float32)
    with np.errstate(over="ignore"):  # the caller looks for infinite values
        np.multiply(_multiply(a.values, b.values), a.unit * b.unit, out=found, casting="same_kind")
    return found


def _bits(terms: int) -> int:
    return (_EXACT_BITS - terms.bit_length()) // 2


def exact_product(a: Floats, b: Floats) -> Floats:
    """Return :func:`product` of float32 matrices."""
    return product(whole(a, a.shape[1]), whole(b, a.shape[1]))


def _multiply(a: Doubles, b: Doubles) -> Doubles:
    """Return a b, in blocks that one thread computes, unless it is large.

    Ranks that share cores have more threads than cores if each takes several, and threads then mostly wait for each
    other. Blocks take 1.6 times as long as the whole, so a BLAS that has only one thread computes the whole.
    """
    (rows, terms), columns = a.shape, b.shape[1]
    if not _ONE_THREAD < rows * terms * columns <= _SEVERAL_THREADS or _threads()() == 1:
        return a @ b
    found = np.empty((rows, columns))
    elements = max(_ONE_THREAD // terms, 1)
    width = min(columns, max(math.isqrt(elements), 1))
    height = min(rows, max(elements // width, 1))
    width = max(elements // height, 1)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            found[i : i + height, j : j + width] = a[i : i + height] @ b[:, j : j + width]
    return found


@cache
def _threads() -> Callable[[], int]:
    """Return a function that returns the number of threads of NumPy's BLAS, or 0 if that is not known."""
    user = importlib.util.find_spec("numpy.linalg._umath_linalg")
    try:
        library = ctypes.CDLL(user.origin if user is not None else None)  # and its dependencies
    except OSError:
        return lambda: 0
    for name in _THREADS:
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = ctypes.c_int, []
            found: Callable[[], int] = function
            return found
    return lambda: 0
