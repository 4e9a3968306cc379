"""Matrix products that have the same bits on every machine, whatever its BLAS adds up first."""

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

#: Whole numbers up to 2**53 in magnitude are exact in float64, and so is every sum that stays below.
_EXACT_BITS = 53
#: OpenBLAS takes one thread for products of at most so many multiply-adds.
_ONE_THREAD = 1 << 18
#: Products above it are worth several threads.
_SEVERAL_THREADS = 1 << 26
#: What NumPy's BLAS may call the function that tells its threads.
_THREADS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)


@dataclass(frozen=True, eq=False)
class Whole:
    """A factor of products: ``values`` are whole numbers of magnitude 2**``bits`` at most, of which one is ``unit``."""

    values: Doubles
    unit: float
    bits: int

    @property
    def T(self) -> Whole:
        """Transposed."""
        return Whole(self.values.T, self.unit, self.bits)

    @property
    def terms(self) -> int:
        """The larger dimension."""
        return int(max(self.values.shape))

    def first(self, columns: int) -> Whole:
        """The first so many columns."""
        return Whole(self.values[:, :columns], self.unit, self.bits)

    def in_bits(self, bits: int) -> Whole:
        """Rounded once more, to at most so many bits."""
        fewer = self.bits - bits
        return self if fewer <= 0 else Whole(np.rint(self.values * 2.0**-fewer), self.unit * 2.0**fewer, bits)


def whole(values: Floats, terms: int) -> Whole:
    """Rounded to nearest on multiples of 2**(e - bits), with the largest magnitude below 2**e.

    ``terms``: bits are the most for which terms 2**(2 bits) stays below 2**53. NaN everywhere if one is not finite.
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
    """a b, whose sums are exact, so that their order does not matter; each is rounded once, to float32.

    Factors of more bits than k terms allow are rounded once more: 21 for k = 768. NaN everywhere if a factor is.

    a: (m, k), b: (k, n). Returns (m, n), float32.
    """
    bits = _bits(a.values.shape[1])
    if a.bits + b.bits > 2 * bits:
        a, b = a.in_bits(bits), b.in_bits(bits)
    found = np.empty((len(a.values), b.values.shape[1]), np.float32)
    with np.errstate(over="ignore"):  # what is too large is infinite, and whoever asked looks for that
        np.multiply(_multiply(a.values, b.values), a.unit * b.unit, out=found, casting="same_kind")
    return found


def _bits(terms: int) -> int:
    return (_EXACT_BITS - terms.bit_length()) // 2


def exact_product(a: Floats, b: Floats) -> Floats:
    """:func:`product` of float32 matrices."""
    return product(whole(a, a.shape[1]), whole(b, a.shape[1]))


def _multiply(a: Doubles, b: Doubles) -> Doubles:
    """a b, in blocks that one thread computes, unless it is large.

    Ranks that share cores have more threads than cores, if each takes several: then threads wait for each other most of
    the time. Blocks take 1.6 times as long as the whole, so a BLAS that has one thread anyway gets that.
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
    """Tells how many threads NumPy's BLAS takes for large products; 0: it does not say."""
    user = importlib.util.find_spec("numpy.linalg._umath_linalg")
    try:
        library = ctypes.CDLL(user.origin if user is not None else None)  # and what that is linked with
    except OSError:
        return lambda: 0
    for name in _THREADS:
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = ctypes.c_int, []
            found: Callable[[], int] = function
            return found
    return lambda: 0
