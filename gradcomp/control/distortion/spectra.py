"""Measures the error of a matrix's best approximation of rank r, for many r at once.

It runs in parallel with training, whose threads keep all cores busy. A BLAS that shares its work among threads then
waits for them: the eigenvalues of a 400 x 400 matrix took 1,700 ms instead of 7. So products are cut into small ones,
which BLAS computes on the calling thread, and only small matrices are handed to LAPACK.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradcomp.control.base import Doubles, Numbers
from gradcomp.control.distortion import Budget, energies, segment
from gradcomp.core.vectors import Floats
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.dispatch import numpy_multiplies
from gradcomp.kernels.random_factors import initial_q
from gradcomp.kernels.segments import Factor, Shapes

POWER_STEPS = 5
"""Number of power steps that Markov 2024, appendix B.2.2, found sufficient."""

#: Side of the largest matrix that is given to LAPACK, unless memory allows no other way.
_LAPACK_SIDE = 128

#: Products of square matrices of this side run on one thread (in OpenBLAS, up to 2^18 multiplications do).
_SIDE = 64

#: Elements that are converted to float64 at a time.
_PIECE = 1 << 18


def rest_norms(matrix: Floats, ranks: Numbers, budget: Budget, *, seed: int, layer: int) -> Doubles:
    """Returns e_r = sqrt(sum over i > r of s_i^2) for every r in ``ranks``; s_i are the descending singular values.

    They come from the matrix's product with itself or from power steps (Markov 2024, appendix B.2), whichever is
    cheaper; see :func:`product_is_cheaper`.

    Args:
        matrix: float32, n x m, contiguous, finite, neither side 0.
        ranks: int64, each in 1..min(n, m).
        budget: if the cheaper method takes too much memory, the other one is used. ConfigError if both do.
        seed: seeds the first Q of the power steps.
        layer: hash of the layer, for the same Q.
    """
    largest = int(ranks.max())
    product, steps = product_bytes(matrix.shape), _steps_bytes(matrix.shape, largest)
    ways = (product, steps) if product_is_cheaper(matrix.shape, largest) else (steps, product)
    if budget.first_or_least(*ways) == product:
        return by_product(matrix, ranks)
    return by_power_steps(matrix, ranks, seed=seed, layer=layer)


def product_is_cheaper(shape: tuple[int, ...], largest_rank: int) -> bool:
    """Returns true if the matrix's product with itself is cheaper than power steps with ``largest_rank`` columns.

    With k = min(n, m) and b the largest rank, in the time of a multiplication and addition of the product:

        by the product    n m k + 3 k^3             (the product, float64; its eigenvalues), if k is at most 128
        by power steps    n m (30 + 15 b) + 10^7    (10 products with b columns, float32, orthogonalisation; calls)

    The paper compares O(n m k) with the sum over ranks of O(n m r); here one run serves all ranks.
    """
    n, m = shape
    k = min(n, m)
    return k <= _LAPACK_SIDE and n * m * k + 3 * k**3 <= n * m * (30 + 15 * largest_rank) + 10**7


def product_bytes(shape: tuple[int, ...]) -> int:
    """Returns the memory that :func:`squared_singular_values` takes."""
    k = min(shape)
    return 8 * (3 * k * k + 3 * max(_PIECE, _SIDE * k))


def _steps_bytes(shape: tuple[int, ...], columns: int) -> int:
    n, m = shape
    # Bytes per element of the rest, and of NumPy's copies.
    one = 9 if numpy_multiplies(columns) else 4
    return one * n * m + 4 * columns * (n + m) + 128 * columns * m  # the last term is for random numbers


# --- by the product -----------------------------------------------------------------------------------------


def by_product(matrix: Floats, ranks: Numbers) -> Doubles:
    """Returns the norms of :func:`rest_norms`, computed from the squared singular values."""
    return _rest(squared_singular_values(matrix), 0.0, ranks)


def squared_singular_values(matrix: Floats) -> Doubles:
    """Returns all s_i^2, ascending: the eigenvalues of M M^T or M^T M, whichever is smaller, in float64.

    They are accurate to about 2^-52 of the largest, so norms made of them to about 1e-8 of the matrix's own.
    """
    # The matrix or its transpose has no more columns than rows; singular values are the same.
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    found: Doubles = np.maximum(np.linalg.eigvalsh(_product(tall)), 0.0)
    return found


def _product(tall: Floats) -> Doubles:
    """Returns the lower triangle of M^T M, computed tile by tile."""
    columns = tall.shape[1]
    tiles = [slice(start, start + _SIDE) for start in range(0, columns, _SIDE)]
    product = np.zeros((columns, columns))
    for stack in _stacks(tall):
        for i, rows in enumerate(tiles):
            left = stack[:, :, rows].transpose(0, 2, 1)
            for across in tiles[: i + 1]:
                product[rows, across] += (left @ stack[:, :, across]).sum(axis=0)
    return product


def _stacks(tall: Floats) -> Iterator[Doubles]:
    """Yields the rows in float64, as stacks of matrices with 64 rows each; the last matrix may have fewer."""
    rows, columns = tall.shape
    step = _SIDE * max(1, _PIECE // (_SIDE * columns))
    whole = rows // _SIDE * _SIDE
    for start in range(0, whole, step):
        yield tall[start : min(start + step, whole)].astype(np.float64).reshape(-1, _SIDE, columns)
    if whole < rows:
        yield tall[None, whole:].astype(np.float64)


def _rest(inside: Doubles, outside: float, ranks: Numbers) -> Doubles:
    """Returns sqrt(outside + all but the r largest of ``inside``) for every r; ``inside`` ascends."""
    # The smallest are summed first, so that nothing cancels.
    sums = np.cumsum(np.append(outside, inside))
    norms: Doubles = np.sqrt(sums[len(inside) - ranks])
    return norms


# --- by power steps -----------------------------------------------------------------------------------------


def by_power_steps(matrix: Floats, ranks: Numbers, *, seed: int, layer: int) -> Doubles:
    """Returns the norms of :func:`rest_norms` from ``POWER_STEPS`` steps of PowerSGD at the largest rank b.

    The steps use PowerSGD's kernels and the layer's initial Q:

    P <- orthonormal M Q and Q <- M^T P, five times; s = the singular values of the last Q; then

        e_r^2 = ||M - P Q^T||^2 + sum over r < i <= b of s_i^2

    is the error of the best approximation of rank r whose columns are in the span of P. It is never below the optimum,
    and never above that of as many steps at rank r, whose span is part of this one. (The paper runs each rank
    separately, O(n m r) each; this is one run, O(n m b).) Sums are float32: accurate to about 1e-6 of the matrix's
    norm.
    """
    scale, _, q, rest = power_steps(matrix, int(ranks.max()), seed=seed, layer=layer)
    outside = energies(segment(rest.ctypes.data, rest.size))[0]
    norms: Doubles = scale * _rest(squared_singular_values(q), outside, ranks)
    return norms


def power_steps(matrix: Floats, rank: int, *, seed: int, layer: int) -> tuple[float, Floats, Floats, Floats]:
    """Returns s, P, Q and R, all float32, with M = s (P Q^T + R), P and Q column by column, and P orthonormal.

    The scale s, a power of two, gives M / s a norm of about 1, so that no product overflows or underflows. ``rank`` is
    the number of columns; see :func:`by_power_steps`.
    """
    n, m = matrix.shape
    rest = np.empty(matrix.size, dtype=np.float32)
    table = segment(matrix.ctypes.data, matrix.size)
    table["next_residual"] = rest.ctypes.data
    # The exponent is limited so that the factor, a float32, does not overflow or underflow either.
    exponent = int(np.frexp(np.sqrt(energies(table)[0]))[1])
    scale = 2.0 ** min(max(exponent, -126), 126)
    factor = np.array([1.0 / scale], dtype=np.float32)

    shapes = Shapes(np.array([n]), np.array([m]), np.array([rank]))
    begin, flags = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint8)
    p = Factor(np.empty(n * rank, dtype=np.float32), begin)
    q = Factor(initial_q(m, rank, seed=seed, layer=layer).reshape(-1), begin)
    for _ in range(POWER_STEPS):
        HOST.kernels.project(table, flags, factor, shapes, q, p, decay=1.0)
        HOST.kernels.orthogonalise(shapes.rows, shapes.ranks, p)
        HOST.kernels.back_project(table, shapes, p, q)
    HOST.kernels.subtract(table, shapes, p, q)
    return scale, p.values.reshape(rank, n), q.values.reshape(rank, m), rest
