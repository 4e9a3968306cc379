"""Sparse selections of whole layers: the typed way to the kernels that `reference_selection` defines.

Each function serves a whole table; read `reference_selection` for arrays, units and errors.
"""

from __future__ import annotations

from gradcomp.kernels import bodies
from gradcomp.kernels.reference_selection import MAX_LAYER_ELEMENTS, Doubles, Floats, Indices, Numbers
from gradcomp.kernels.segments import Bytes, SegmentTable

__all__ = [
    "MAX_LAYER_ELEMENTS",
    "contribute",
    "put",
    "sample_thresholds",
    "select_above",
    "select_top",
    "squares",
    "tail",
    "take",
]


def contribute(table: SegmentTable, flags: Bytes, factors: Floats, *, decay: float) -> None:
    """next residual <- factors[i] * gradient + decay * residual; see `reference_selection.contribute`."""
    bodies.active().contribute(table, flags, factors, decay=decay)


def squares(table: SegmentTable, out: Doubles) -> None:
    """out[i] <- sum of the squared gradient; see `reference_selection.squares`."""
    bodies.active().squares(table, out)


def select_top(
    table: SegmentTable,
    flags: Bytes,
    factors: Floats,
    counts: Numbers,
    offsets: Numbers,
    indices: Indices,
    values: Floats,
    *,
    decay: float,
) -> None:
    """Contribute, and select the counts[i] largest magnitudes; see `reference_selection.select_top`."""
    bodies.active().select_top(table, flags, factors, counts, offsets, indices, values, decay=decay)


def select_above(
    table: SegmentTable,
    thresholds: Floats,
    limits: Numbers,
    offsets: Numbers,
    indices: Indices,
    values: Floats,
    found: Numbers,
) -> None:
    """Select magnitudes of at least thresholds[i]; see `reference_selection.select_above`."""
    bodies.active().select_above(table, thresholds, limits, offsets, indices, values, found)


def sample_thresholds(
    table: SegmentTable, counts: Numbers, thresholds: Floats, *, stride: int, phase: int
) -> None:
    """Thresholds for about counts[i] elements, from a sample; see `reference_selection.sample_thresholds`."""
    bodies.active().sample_thresholds(table, counts, thresholds, stride=stride, phase=phase)


def tail(
    table: SegmentTable,
    thresholds: Floats,
    counts: Numbers,
    sums: Doubles,
    squares_out: Doubles,
    maxima: Floats,
) -> None:
    """Number, sum, sum of squares and maximum of large magnitudes; see `reference_selection.tail`."""
    bodies.active().tail(table, thresholds, counts, sums, squares_out, maxima)


def take(table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Indices, values: Floats) -> None:
    """values <- next residual[indices]; see `reference_selection.take`."""
    bodies.active().take(table, offsets, counts, indices, values)


def put(table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Indices, values: Floats) -> None:
    """next residual[indices] <- values; see `reference_selection.put`."""
    bodies.active().put(table, offsets, counts, indices, values)
