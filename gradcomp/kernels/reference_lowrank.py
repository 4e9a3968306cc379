"""The low-rank kernels in NumPy, which define them: layers as matrices M, and their factors P and Q.

`orthogonalise`, `expand` and `subtract` work on what all ranks hold alike and give the same bytes in every body:
each product and sum is rounded on its own, in the order written here. `project` and `back_project` come before the
last reply of the network; bodies agree on M, but sum P and Q in an order of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.reference import _all_finite, _gradient, _residual, _view
from gradcomp.kernels.reference_sums import ordered_sum
from gradcomp.kernels.segments import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    MAX_ELEMENTS,
    SEGMENT,
    Bytes,
    SegmentTable,
    check_array,
    check_elements,
)

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

DEPENDENT = 2.0**-20
"""A column whose norm falls below this part of what it was depends on those before it."""


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
        return _view(self.segment["next_residual"], self.n * self.m, DTYPES[FLOAT32]).reshape(self.n, self.m)

    def product(self) -> Floats:
        """P Q^T, summed over the columns of both from the first to the last."""
        if not self.p.size or not self.q.size:
            return np.zeros((self.n, self.m), np.float32)
        terms = (p[:, None] * q[None, :] for p, q in zip(self.p, self.q, strict=True))
        total: Floats = functools.reduce(np.add, terms)
        return total


def project(
    table: SegmentTable,
    flags: Bytes,
    factors: Floats,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    q: Floats,
    q_at: Int64s,
    p: Floats,
    p_at: Int64s,
    *,
    decay: float,
) -> None:
    """See `lowrank.project`."""
    check_array("flags", flags, np.uint8, len(table), writable=True)
    check_array("factors", factors, np.float32, len(table))
    check_array("p", p, np.float32, writable=True)
    for matrix in _matrices(table, rows, columns, ranks, p, p_at, q, q_at):
        segment = matrix.segment
        with np.errstate(all="ignore"):
            c = factors[matrix.index] * _gradient(segment, np.float32)
            if segment["residual"]:
                c = c + np.float32(decay) * _residual(segment)
            matrix.next_residual.reshape(-1)[:] = c
            matrix.p[:] = np.matmul(matrix.next_residual, matrix.q.T).T
        if not _all_finite(c):
            matrix.p[:] = np.nan
            flags[matrix.index] |= 1


def back_project(
    table: SegmentTable,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
) -> None:
    """See `lowrank.back_project`."""
    check_array("q", q, np.float32, writable=True)
    for matrix in _matrices(table, rows, columns, ranks, p, p_at, q, q_at):
        with np.errstate(all="ignore"):
            matrix.q[:] = np.matmul(matrix.p, matrix.next_residual)


def orthogonalise(rows: Int64s, ranks: Int64s, p: Floats, p_at: Int64s) -> None:
    """See `lowrank.orthogonalise`."""
    check_array("p", p, np.float32, writable=True)
    for name, array in (("rows", rows), ("ranks", ranks), ("p_at", p_at)):
        check_array(name, array, np.int64, len(rows))
    numbers = zip(p_at.tolist(), rows.tolist(), ranks.tolist(), strict=True)
    places = [_columns(index, "P", p, *row) for index, row in enumerate(numbers)]
    for columns in places:
        if not _all_finite(columns):
            columns[:] = np.nan
            continue
        for k, column in enumerate(columns if columns.size else ()):
            column[:] = _independent_part(column, columns[:k])


def expand(
    table: SegmentTable,
    flags: Bytes,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
    *,
    divisor: float,
    scale: float,
) -> None:
    """See `lowrank.expand`."""
    check_array("flags", flags, np.uint8, len(table), writable=True)
    for matrix in _matrices(table, rows, columns, ranks, p, p_at, q, q_at, outputs=True):
        segment = matrix.segment
        output = _view(segment["output"], segment["length"], DTYPES[segment["dtype"]])
        if flags[matrix.index]:
            output[:] = np.nan
            continue
        with np.errstate(all="ignore"):
            mean = matrix.product() / np.float32(divisor) * np.float32(scale)
            output[:] = mean.reshape(-1).astype(output.dtype)
        flags[matrix.index] |= not _all_finite(output)


def subtract(
    table: SegmentTable,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
) -> None:
    """See `lowrank.subtract`."""
    for matrix in _matrices(table, rows, columns, ranks, p, p_at, q, q_at):
        with np.errstate(all="ignore"):
            matrix.next_residual[:] = matrix.next_residual - matrix.product()


def keep(
    sides: Int64s, ranks: Int64s, factor: Floats, at: Int64s, kept: Floats, before: Int64s, after: Int64s
) -> None:
    """See `lowrank.keep`."""
    sizes = sides * ranks
    if not sizes.any():
        return
    lengths = np.repeat(sides, ranks)[np.repeat(sides, ranks) > 0]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    x = factor[np.repeat(at, sizes) + within]
    with np.errstate(all="ignore"):
        largest = np.maximum.reduceat(np.abs(x), np.cumsum(lengths) - lengths)
        exponents = np.where(np.isfinite(largest), -np.frexp(largest)[1], 0)
        scaled = np.ldexp(x, np.repeat(exponents, lengths))
    same = kept[np.repeat(before, sizes) + within]
    kept[np.repeat(after, sizes) + within] = np.where(np.repeat(largest == 0, lengths), same, scaled)


# --- columns ------------------------------------------------------------------------------------------------


def _independent_part(x: Floats, before: Floats) -> Floats:
    """The unit vector along what x has beyond the orthonormal rows of `before`, or zero if that is nothing."""
    if not x.any():
        return np.zeros_like(x)
    _, exponent = np.frexp(np.abs(x).max().astype(np.float64))
    x = (x * np.ldexp(1.0, 1 - exponent)).astype(np.float32)  # the largest magnitude is in [1, 2)
    whole = np.sqrt(dot(x, x))
    # Once leaves rounding errors that are large beside a small remainder; twice is enough.
    for u in (*before, *before):
        x = x - np.float32(dot(u, x)) * u
    norm = np.sqrt(dot(x, x))
    if not norm > DEPENDENT * whole:
        return np.zeros_like(x)
    unit: Floats = (x * (1.0 / norm)).astype(np.float32)
    return unit


def dot(x: Floats, y: Floats) -> np.float64:
    """x . y in float64, in the order of `reference_sums`."""
    (total,) = ordered_sum(np.multiply(x, y, dtype=np.float64)[None])
    return np.float64(total)


# --- checks -------------------------------------------------------------------------------------------------


def _matrices(
    table: SegmentTable,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
    *,
    outputs: bool = False,
) -> Iterator[_Matrix]:
    """The layers of a call, or those with an output, all checked before the first is given out."""
    check_array("table", table, SEGMENT)
    check_array("p", p, np.float32)
    check_array("q", q, np.float32)
    vectors = {"rows": rows, "columns": columns, "ranks": ranks, "p_at": p_at, "q_at": q_at}
    for name, vector in vectors.items():
        check_array(name, vector, np.int64, len(table))
    found = []
    for index, numbers in enumerate(zip(*(vector.tolist() for vector in vectors.values()), strict=True)):
        segment = table[index]
        if not outputs or segment["output"]:
            check_elements(table[index : index + 1])
            found.append(_matrix(index, segment, p, q, *numbers, needs_next_residual=not outputs))
    return iter(found)


def _matrix(
    index: int,
    segment: np.void,
    p: Floats,
    q: Floats,
    n: int,
    m: int,
    rank: int,
    p_at: int,
    q_at: int,
    *,
    needs_next_residual: bool,
) -> _Matrix:
    if segment["dtype"] == FLOAT64:
        raise ValueError(f"segment {index}: low rank has no float64")
    if needs_next_residual and segment["length"] and not segment["next_residual"]:
        raise ValueError(f"segment {index}: no next residual to hold the matrix")
    if not (0 <= n <= MAX_ELEMENTS and 0 <= m <= MAX_ELEMENTS and n * m == segment["length"]):
        raise ValueError(f"segment {index}: rows times columns is not the length of the segment")
    return _Matrix(
        index,
        segment,
        n,
        m,
        _columns(index, "P", p, p_at, n, rank),
        _columns(index, "Q", q, q_at, m, rank),
    )


def _columns(index: int, name: str, array: Floats, at: int, length: int, count: int) -> Any:
    if min(at, length, count) < 0 or at + length * count > len(array):
        raise ValueError(f"segment {index}: {name} does not lie inside its array")
    return array[at : at + length * count].reshape(count, length)
