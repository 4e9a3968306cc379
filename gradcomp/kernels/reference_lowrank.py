"""The low-rank kernels in NumPy, which define them: layers as matrices M, and their factors P and Q.

Row i of a table is a whole layer, seen as the matrix M_i with n_i rows and m_i columns, row-major: n_i m_i is the
row's length. Its factors P_i (n_i x r_i) and Q_i (m_i x r_i) lie in flat arrays, see
:class:`gradcomp.kernels.segments.Factor`. M lies in the rows' next residuals, which end up as the new residuals.

`orthogonalise`, `expand` and `subtract` work on data that is equal on all ranks and give the same bytes in every
backend: each product and sum is rounded on its own, in the order written here. `project` and `back_project` work on a
rank's own data; backends agree on M, but sum P and Q in an order of their own.

Each call raises TypeError for an array that is not a contiguous vector of its dtype, and ValueError for a row that is
float64, whose numbers do not fit together, or whose factors do not lie inside their arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcomp.kernels.reference_memory import (
    all_finite,
    gradient_of,
    memory_at,
    next_residual_of,
    ordered_sum,
    residual_of,
)
from gradcomp.kernels.segments import (
    DTYPES,
    FLOAT64,
    MAX_ELEMENTS,
    SEGMENT,
    Bytes,
    Factor,
    Floats,
    SegmentTable,
    Shapes,
    Sizes,
    check_array,
    check_elements,
)

DEPENDENT = 2.0**-20
"""A column whose norm falls below this fraction of its initial norm depends on the columns before it."""


@dataclass(frozen=True)
class _Matrix:
    """One layer of a call: P with a column per row of `p`, Q with a column per row of `q`."""

    index: int
    segment: np.void
    n: int
    m: int
    p: Floats
    q: Floats

    @property
    def next_residual(self) -> Floats:
        return next_residual_of(self.segment).reshape(self.n, self.m)

    def product(self) -> Floats:
        """Returns P Q^T, summed over the columns of both from the first to the last."""
        if not self.p.size or not self.q.size:
            return np.zeros((self.n, self.m), np.float32)
        terms = (p[:, None] * q[None, :] for p, q in zip(self.p, self.q, strict=True))
        total: Floats = functools.reduce(np.add, terms)
        return total


def project(
    table: SegmentTable, flags: Bytes, factors: Floats, shapes: Shapes, q: Factor, p: Factor, *, decay: float
) -> None:
    """Computes next residual <- M = factor * gradient + decay * residual, and P <- M Q.

    A layer with a non-finite element of M gets its flag set and a P of NaN; its next residual is unspecified then.

    Args:
        table: SEGMENT rows; reads gradient (0: absent, zero), residual (0: none); writes next residual.
        flags: uint8, one per row; only ORed into.
        factors: float32, one per row; factor of the gradient.
        shapes: n, m and r of each row.
        q: read.
        p: written.
        decay: factor of the residual.
    """
    check_array("flags", flags, np.uint8, len(table), writable=True)
    check_array("factors", factors, np.float32, len(table))
    check_array("p", p.values, np.float32, writable=True)
    for matrix in _matrices(table, shapes, p, q):
        segment = matrix.segment
        with np.errstate(all="ignore"):
            c = factors[matrix.index] * gradient_of(segment, np.float32)
            if segment["residual"]:
                c = c + np.float32(decay) * residual_of(segment)
            matrix.next_residual.reshape(-1)[:] = c
            matrix.p[:] = np.matmul(matrix.next_residual, matrix.q.T).T
        if not all_finite(c):
            matrix.p[:] = np.nan
            flags[matrix.index] |= 1


def back_project(table: SegmentTable, shapes: Shapes, p: Factor, q: Factor) -> None:
    """Computes Q <- M^T P, with M in the next residual.

    Args:
        table: SEGMENT rows; reads next residual.
        shapes: n, m and r of each row.
        p: read.
        q: written.
    """
    check_array("q", q.values, np.float32, writable=True)
    for matrix in _matrices(table, shapes, p, q):
        with np.errstate(all="ignore"):
            matrix.q[:] = np.matmul(matrix.p, matrix.next_residual)


def orthogonalise(rows: Sizes, ranks: Sizes, p: Factor) -> None:
    """Makes the columns of each P orthonormal, in place, or zero where they depend on those before them.

    For each column x, from the first to the last:

        x <- 2^e x, so that its largest magnitude is in [1, 2)
        twice, for each column u before: x <- x - (u . x) u
        x <- x / |x| if |x| > 2^-20 of its norm before the subtractions, else 0

    Scalar products are float64, in the order of `reference_memory`; vectors are float32. The columns that are not zero
    satisfy |P^T P - I| < 1e-6, nearly dependent ones included. A P that is not finite becomes NaN.

    Source: Vogels et al. 2019, Algorithm 1, line 5 (modified Gram-Schmidt). We differ in the scaling, which keeps
    magnitudes from under- and overflow; in the second pass, without which nearly dependent columns are far from
    orthogonal; and in the zeros, where dividing by a norm of rounding errors, or by zero, would give noise or NaN: P
    P^T is nevertheless an orthogonal projection, and a layer of zeros gets a mean of exactly zero.

    Args:
        rows: int64, n of each layer.
        ranks: int64, r of each layer.
        p: read and written.
    """
    check_array("p", p.values, np.float32, writable=True)
    for name, array in (("rows", rows), ("ranks", ranks), ("p_at", p.at)):
        check_array(name, array, np.int64, len(rows))
    numbers = zip(p.at.tolist(), rows.tolist(), ranks.tolist(), strict=True)
    places = [_columns(index, "P", p.values, *row) for index, row in enumerate(numbers)]
    for columns in places:
        if not all_finite(columns):
            columns[:] = np.nan
            continue
        for k, column in enumerate(columns if columns.size else ()):
            column[:] = _independent_part(column, columns[:k])


def expand(
    table: SegmentTable, flags: Bytes, shapes: Shapes, p: Factor, q: Factor, *, divisor: float, scale: float
) -> None:
    """Writes output <- scale * ((P Q^T) / divisor), rounded to the row's dtype.

    (P Q^T)[a, b] = ((P[a, 0] Q[b, 0]) + P[a, 1] Q[b, 1]) + ..., each product and sum rounded to float32. A layer whose
    flag is set on entry is filled with NaN; one with a non-finite output gets its flag set. Rows without an output
    are skipped, unchecked.

    Args:
        table: SEGMENT rows; writes output.
        flags: uint8, one per row; read, and ORed into.
        shapes: n, m and r of each row.
        p: read.
        q: read.
        divisor: number of ranks, or 1 for factors that are means already.
        scale: factor of the result.
    """
    check_array("flags", flags, np.uint8, len(table), writable=True)
    for matrix in _matrices(table, shapes, p, q, outputs=True):
        segment = matrix.segment
        output = memory_at(segment["output"], segment["length"], DTYPES[segment["dtype"]])
        if flags[matrix.index]:
            output[:] = np.nan
            continue
        with np.errstate(all="ignore"):
            mean = matrix.product() / np.float32(divisor) * np.float32(scale)
            output[:] = mean.reshape(-1).astype(output.dtype)
        flags[matrix.index] |= not all_finite(output)


def subtract(table: SegmentTable, shapes: Shapes, p: Factor, q: Factor) -> None:
    """Computes next residual <- next residual - P Q^T, the product as in `expand`.

    Args:
        table: SEGMENT rows; reads and writes next residual.
        shapes: n, m and r of each row.
        p: read.
        q: read.
    """
    for matrix in _matrices(table, shapes, p, q):
        with np.errstate(all="ignore"):
            matrix.next_residual[:] = matrix.next_residual - matrix.product()


def keep(sides: Sizes, ranks: Sizes, factor: Factor, kept: Floats, before: Sizes, after: Sizes) -> None:
    """Stores each factor, column by column, for the next step.

    For each column x of a factor, and the stored column y: y <- y if x is zero, else x scaled by the power of two that
    brings its largest magnitude into [1/2, 1). A column that is not finite is not scaled.

    Args:
        sides: int64, elements of a column of each layer.
        ranks: int64, r of each layer.
        factor: read.
        kept: float32; the storage, read and written.
        before: int64, where each stored factor begins.
        after: int64, where each new one is to begin: nowhere where something is read.
    """
    sizes = sides * ranks
    if not sizes.any():
        return
    lengths = np.repeat(sides, ranks)[np.repeat(sides, ranks) > 0]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    x = factor.values[np.repeat(factor.at, sizes) + within]
    with np.errstate(all="ignore"):
        largest = np.maximum.reduceat(np.abs(x), np.cumsum(lengths) - lengths)
        exponents = np.where(np.isfinite(largest), -np.frexp(largest)[1], 0)
        scaled = np.ldexp(x, np.repeat(exponents, lengths))
    same = kept[np.repeat(before, sizes) + within]
    kept[np.repeat(after, sizes) + within] = np.where(np.repeat(largest == 0, lengths), same, scaled)


# --- columns ------------------------------------------------------------------------------------------------


def _independent_part(x: Floats, before: Floats) -> Floats:
    """Returns the unit vector along what x has beyond the orthonormal rows of `before`; zero if x depends on them."""
    if not x.any():
        return np.zeros_like(x)
    _, exponent = np.frexp(np.abs(x).max().astype(np.float64))
    x = (x * np.ldexp(1.0, 1 - exponent)).astype(np.float32)  # the largest magnitude is in [1, 2)
    whole = np.sqrt(dot(x, x))
    # One pass leaves rounding errors that are large relative to a small remainder; two passes are enough.
    for u in (*before, *before):
        x = x - np.float32(dot(u, x)) * u
    norm = np.sqrt(dot(x, x))
    if not norm > DEPENDENT * whole:
        return np.zeros_like(x)
    unit: Floats = (x * (1.0 / norm)).astype(np.float32)
    return unit


def dot(x: Floats, y: Floats) -> np.float64:
    """Returns x . y in float64, in the order of `reference_memory`."""
    (total,) = ordered_sum(np.multiply(x, y, dtype=np.float64)[None])
    return np.float64(total)


# --- checks -------------------------------------------------------------------------------------------------


def _matrices(
    table: SegmentTable, shapes: Shapes, p: Factor, q: Factor, *, outputs: bool = False
) -> Iterator[_Matrix]:
    """Checks all layers of a call, or those with an output, and then iterates over them."""
    check_array("table", table, SEGMENT)
    check_array("p", p.values, np.float32)
    check_array("q", q.values, np.float32)
    vectors = {**shapes._asdict(), "p_at": p.at, "q_at": q.at}
    for name, vector in vectors.items():
        check_array(name, vector, np.int64, len(table))
    found = []
    for index, numbers in enumerate(zip(*(vector.tolist() for vector in vectors.values()), strict=True)):
        segment = table[index]
        if not outputs or segment["output"]:
            check_elements(table[index : index + 1])
            n, m, rank, p_at, q_at = numbers
            if segment["dtype"] == FLOAT64:
                raise ValueError(f"segment {index}: low rank has no float64")
            if not outputs and segment["length"] and not segment["next_residual"]:
                raise ValueError(f"segment {index}: no next residual to hold the matrix")
            if not (0 <= n <= MAX_ELEMENTS and 0 <= m <= MAX_ELEMENTS and n * m == segment["length"]):
                raise ValueError(f"segment {index}: rows times columns is not the length of the segment")
            columns = (
                _columns(index, "P", p.values, p_at, n, rank),
                _columns(index, "Q", q.values, q_at, m, rank),
            )
            found.append(_Matrix(index, segment, n, m, *columns))
    return iter(found)


def _columns(index: int, name: str, array: Floats, at: int, length: int, count: int) -> Any:
    if min(at, length, count) < 0 or at + length * count > len(array):
        raise ValueError(f"segment {index}: {name} does not lie inside its array")
    return array[at : at + length * count].reshape(count, length)
