"""Matrix products that have the same bits on every machine, whatever its BLAS adds up first."""

from __future__ import annotations

import math

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


def exact_product(a: Floats, b: Floats) -> Floats:
    """a b, of factors rounded to a common grid each; the sums are exact, so their order does not matter.

    Each factor is rounded to nearest on multiples of 2**(e - bits), with its largest magnitude below 2**e. With k terms
    a sum, bits is the largest number for which k 2**(2 bits) stays below 2**53: 21 for k = 768. The result is rounded
    once, to float32. NaN everywhere if a factor is not finite.

    a: (m, k), b: (k, n), float32. Returns (m, n), float32.
    """
    bits = (_EXACT_BITS - a.shape[1].bit_length()) // 2
    whole_a, unit_a = _whole(a, bits)
    whole_b, unit_b = _whole(b, bits)
    product = _multiply(whole_a, whole_b)
    product *= unit_a * unit_b
    with np.errstate(over="ignore"):  # what is too large is infinite, and whoever asked looks for that
        return product.astype(np.float32)


def _multiply(a: Doubles, b: Doubles) -> Doubles:
    """a b, in blocks that one thread computes, unless it is large.

    Ranks that share cores have more threads than cores, if each takes several: then threads wait for each other most of
    the time.
    """
    (rows, terms), columns = a.shape, b.shape[1]
    if not _ONE_THREAD < rows * terms * columns <= _SEVERAL_THREADS:
        return a @ b
    product = np.empty((rows, columns))
    elements = max(_ONE_THREAD // terms, 1)
    width = min(columns, max(math.isqrt(elements), 1))
    height = min(rows, max(elements // width, 1))
    width = max(elements // height, 1)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            product[i : i + height, j : j + width] = a[i : i + height] @ b[:, j : j + width]
    return product


def _whole(values: Floats, bits: int) -> tuple[Doubles, float]:
    """Whole numbers of magnitude 2**bits at most, and what one stands for."""
    largest = float(np.abs(values).max(initial=0))
    if not np.isfinite(largest):
        return np.full(values.shape, np.nan), 1.0
    exponent = int(np.frexp(largest)[1]) - bits
    whole = values.astype(np.float64)
    whole *= 2.0**-exponent
    return np.rint(whole, out=whole), 2.0**exponent
