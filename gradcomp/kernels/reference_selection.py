"""Sparse selections in NumPy: this file defines what every other backend computes, byte for byte.

A row of the table is a whole layer of at most 2**32 - 1 elements, in float32 or half precision. Its contribution
is c = factor * gradient + decay * residual in float32, every product and sum on its own, as in `reference`; c lies
in the float32 next residual of the row. Magnitudes order elements; of equal magnitudes the lower index comes first, and
-0 equals 0. NaN is selected by nothing.

The selections of all rows lie in flat arrays: that of row i in indices[offsets[i] : offsets[i] + counts[i]]
(uint32, ascending, counted from the layer's first element), and its values (float32) in the same places. Sums over
elements are float64, in the order of `reference_memory`.

All functions raise TypeError for an array of the wrong dtype, read-only, not aligned or not contiguous, and
ValueError, before anything is written, for a malformed row, a row without the next residual it needs, vectors that do
not have one item per row, and selections that do not lie inside the flat arrays.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.reference_indices import check_aligned
from gradcomp.kernels.reference_memory import gradient_of, next_residual_of, ordered_sum, residual_of
from gradcomp.kernels.segments import (
    FLOAT64,
    SEGMENT,
    Bytes,
    Doubles,
    Floats,
    Indices,
    SegmentTable,
    Sizes,
    check_array,
    check_elements,
    require_rows,
)

MAX_LAYER_ELEMENTS: Final = (1 << 32) - 1
"""Elements of a layer whose indices are sent."""


def contribute(table: SegmentTable, flags: Bytes, factors: Floats, *, decay: float) -> None:
    """Computes next residual <- c, and flags[i] |= 1 if some c of row i is not finite.

    Args:
        table: SEGMENT rows; reads gradient, residual; writes next residual.
        flags: uint8, one per row; only ORed into.
        factors: float32, one per row: factor of the gradient.
        decay: factor of the residual.

    Raises:
        ValueError: also for a float64 gradient.
    """
    check_vectors(table, flags=(flags, np.uint8, True), factors=(factors, np.float32, False))
    check_narrow(table)
    check_next_residuals(table)
    for i, segment in enumerate(table):
        flags[i] |= _contribute(segment, factors[i], decay)


def squares(table: SegmentTable, out: Doubles) -> None:
    """Computes out[i] = sum of g * g over the gradient of row i, in float64; 0 if the gradient is absent.

    Args:
        table: SEGMENT rows; reads gradient, of any dtype.
        out: float64, one per row.
    """
    check_vectors(table, out=(out, np.float64, True))
    for i, segment in enumerate(table):
        with np.errstate(all="ignore"):
            (out[i],) = ordered_sum(np.square(gradient_of(segment, np.float64))[None])


def select_top(
    table: SegmentTable,
    flags: Bytes,
    factors: Floats,
    counts: Sizes,
    offsets: Sizes,
    indices: Indices,
    values: Floats,
    found: Sizes,
    *,
    decay: float,
    zeros: bool,
) -> None:
    """Runs `contribute` and selects the counts[i] elements of row i with the largest |c|; found[i]: their number.

    With ``zeros`` it selects exactly counts[i]; a row with a non-finite c gets its flag, and the indices 0, 1, ...
    with values of 0. Without, it never selects c = 0: it takes min(counts[i], number of c != 0) elements, and none of
    a row with a non-finite c.

    Args:
        table: SEGMENT rows; reads gradient, residual; writes next residual.
        flags: uint8, one per row; only ORed into.
        factors: float32, one per row: factor of the gradient.
        counts: int64, one per row, in 0..length.
        offsets: int64, one per row: where the row's selection begins.
        indices: uint32, written.
        values: float32, written: c of the selected elements.
        found: int64, one per row, written; may be ``counts``.
        decay: factor of the residual.
        zeros: whether elements of 0 may be selected.

    Raises:
        ValueError: also for a float64 gradient.
    """
    check_vectors(
        table,
        flags=(flags, np.uint8, True),
        factors=(factors, np.float32, False),
        counts=(counts, np.int64, False),
        offsets=(offsets, np.int64, False),
        found=(found, np.int64, True),
    )
    check_narrow(table)
    check_next_residuals(table)
    check_counts(table, counts)
    check_places(table, offsets, counts, indices, values, writable=True)
    for i, segment in enumerate(table):
        wanted = int(counts[i])
        finite = not _contribute(segment, factors[i], decay)
        flags[i] |= not finite
        c = next_residual_of(segment)
        if finite:
            chosen = largest_of(c, np.arange(len(c)) if zeros else np.flatnonzero(c), wanted)
        else:
            chosen = np.arange(wanted if zeros else 0)
        place = slice(int(offsets[i]), int(offsets[i]) + len(chosen))
        indices[place], values[place] = chosen, c[chosen] if finite else 0
        found[i] = len(chosen)


def select_above(
    table: SegmentTable,
    thresholds: Floats,
    limits: Sizes,
    offsets: Sizes,
    indices: Indices,
    values: Floats,
    found: Sizes,
) -> None:
    """Selects the elements of row i with |c| >= thresholds[i], or the limits[i] largest; found[i]: their number.

    Args:
        table: SEGMENT rows; reads c in next residual.
        thresholds: float32, one per row; nothing is selected by NaN.
        limits: int64, one per row, not negative: capacity of the row's selection.
        offsets: int64, one per row: where the row's selection begins.
        indices: uint32, written.
        values: float32, written: c of the selected elements.
        found: int64, one per row, written.
    """
    check_vectors(
        table,
        thresholds=(thresholds, np.float32, False),
        limits=(limits, np.int64, False),
        offsets=(offsets, np.int64, False),
        found=(found, np.int64, True),
    )
    check_next_residuals(table)
    check_places(table, offsets, limits, indices, values, writable=True)
    for i, segment in enumerate(table):
        c = next_residual_of(segment)
        chosen = largest_of(c, np.flatnonzero(np.abs(c) >= thresholds[i]), int(limits[i]))
        place = slice(int(offsets[i]), int(offsets[i]) + len(chosen))
        indices[place], values[place] = chosen, c[chosen]
        found[i] = len(chosen)


def select_adacomp(
    table: SegmentTable,
    factors: Floats,
    limits: Sizes,
    offsets: Sizes,
    indices: Indices,
    values: Floats,
    found: Sizes,
    *,
    bin_size: int,
) -> None:
    """Selects the elements of row i with |c + factors[i] * gradient| >= m > 0, or the limits[i] largest |c| of them.

    m is the largest |c| of the element's bin, NaN aside. Bins are runs of bin_size elements; the last may be shorter.

    Args:
        table: SEGMENT rows; reads gradient, and c in next residual.
        factors: float32, one per row: factor of the gradient.
        limits: int64, one per row, not negative: capacity of the row's selection.
        offsets: int64, one per row: where the row's selection begins.
        indices: uint32, written.
        values: float32, written: c of the selected elements.
        found: int64, one per row, written: number of selected elements.
        bin_size: elements of a bin, at least 1.

    Raises:
        ValueError: also for a float64 gradient or a bin without elements.

    Source: AdaComp (Chen et al. 2018), Algorithm 2.
    """
    check_vectors(
        table,
        factors=(factors, np.float32, False),
        limits=(limits, np.int64, False),
        offsets=(offsets, np.int64, False),
        found=(found, np.int64, True),
    )
    check_narrow(table)
    check_next_residuals(table)
    check_places(table, offsets, limits, indices, values, writable=True)
    if bin_size < 1:
        raise ValueError(f"bin_size {bin_size} is not positive")
    for i, segment in enumerate(table):
        found[i] = 0
        if segment["length"] == 0:
            continue
        c = next_residual_of(segment)
        with np.errstate(all="ignore"):
            ahead = np.abs(c + factors[i] * gradient_of(segment, np.float32))
        begins = np.arange(0, len(c), bin_size)
        largest = np.fmax.reduceat(np.abs(c), begins).repeat(np.diff(begins, append=len(c)))
        candidates = np.flatnonzero((ahead >= largest) & (largest > 0))
        chosen = largest_of(c, candidates, int(limits[i]))
        place = slice(int(offsets[i]), int(offsets[i]) + len(chosen))
        indices[place], values[place] = chosen, c[chosen]
        found[i] = len(chosen)


def sample_thresholds(
    table: SegmentTable, counts: Sizes, thresholds: Floats, *, stride: int, phase: int
) -> None:
    """Estimates the counts[i]-th largest |c| of row i from a sample, and writes it to thresholds[i].

    The sample is the elements phase, phase + stride, ..., m of them, or all elements if there are none of these. The
    threshold is the magnitude of rank max(1, round(counts[i] * m / length)) in the sample, the largest having
    rank 1; the rank is computed in float64 and rounded to even. It is +inf where counts[i] or the length is 0.
    A NaN in the sample counts as infinite.

    Args:
        table: SEGMENT rows; reads c in next residual.
        counts: int64, one per row, in 0..length: elements that are wanted.
        thresholds: float32, one per row, written.
        stride: distance of the sampled elements, at least 1.
        phase: first sampled element, not negative.

    Source: Deep Gradient Compression (Lin et al. 2018), section 3.1, which samples at random; a stride
    with a random phase reads as little and needs no random numbers per element.
    """
    check_vectors(table, counts=(counts, np.int64, False), thresholds=(thresholds, np.float32, True))
    check_next_residuals(table)
    check_counts(table, counts)
    if stride < 1 or phase < 0:
        raise ValueError(f"stride {stride} is not positive, or phase {phase} is negative")
    for i, segment in enumerate(table):
        magnitudes = np.abs(next_residual_of(segment))
        if counts[i] == 0:
            thresholds[i] = np.inf
            continue
        sample = magnitudes[phase::stride] if phase < len(magnitudes) else magnitudes
        share = float(counts[i]) * float(len(sample)) / float(len(magnitudes))
        rank = min(max(1, int(np.rint(share))), len(sample))
        ascending = np.sort(np.where(np.isnan(sample), np.float32(np.inf), sample))
        thresholds[i] = ascending[len(sample) - rank]


def tail(
    table: SegmentTable,
    thresholds: Floats,
    counts: Sizes,
    sums: Doubles,
    squares_out: Doubles,
    maxima: Floats,
) -> None:
    """Computes number, sum of |c|, sum of |c|**2 and largest |c| of the elements of row i with |c| >= thresholds[i].

    The sums run over all positions of the row, where other elements contribute 0. Without such elements all four
    are 0.

    Args:
        table: SEGMENT rows; reads c in next residual.
        thresholds: float32, one per row.
        counts: int64, one per row, written.
        sums: float64, one per row, written.
        squares_out: float64, one per row, written.
        maxima: float32, one per row, written.
    """
    check_vectors(
        table,
        thresholds=(thresholds, np.float32, False),
        counts=(counts, np.int64, True),
        sums=(sums, np.float64, True),
        squares_out=(squares_out, np.float64, True),
        maxima=(maxima, np.float32, True),
    )
    check_next_residuals(table)
    for i, segment in enumerate(table):
        magnitudes = np.abs(next_residual_of(segment))
        chosen = magnitudes >= thresholds[i]
        x = np.where(chosen, magnitudes, np.float32(0)).astype(np.float64)
        counts[i] = np.count_nonzero(chosen)
        sums[i], squares_out[i] = ordered_sum(np.stack((x, np.square(x))))
        maxima[i] = x.max(initial=0.0)


def take(table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, values: Floats) -> None:
    """Copies values <- next residual[indices], for the selection of each row.

    Args:
        table: SEGMENT rows; reads c in next residual.
        offsets: int64, one per row: where the row's selection begins.
        counts: int64, one per row: elements of the selection.
        indices: uint32, in any order; may come from a peer.
        values: float32, written.

    Raises:
        ValueError: also for an index that is not below the row's length.
    """
    _check_selections(table, offsets, counts, indices, values, writable=True)
    for i, segment in enumerate(table):
        place = slice(int(offsets[i]), int(offsets[i] + counts[i]))
        values[place] = next_residual_of(segment)[indices[place]]


def put(table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, values: Floats) -> None:
    """Copies next residual[indices] <- values, for the selection of each row; of a repeated index the last value stays.

    Args:
        table: SEGMENT rows; writes next residual.
        offsets: int64, one per row: where the row's selection begins.
        counts: int64, one per row: elements of the selection.
        indices: uint32, in any order; may come from a peer.
        values: float32, read.

    Raises:
        ValueError: also for an index that is not below the row's length.
    """
    _check_selections(table, offsets, counts, indices, values, writable=False)
    for i, segment in enumerate(table):
        place = slice(int(offsets[i]), int(offsets[i] + counts[i]))
        next_residual_of(segment)[indices[place]] = values[place]


# --- one row ------------------------------------------------------------------------------------------------


def _contribute(segment: np.void, factor: np.float32, decay: float) -> bool:
    """Writes c to the next residual; returns True if some of it is not finite."""
    with np.errstate(all="ignore"):
        c = factor * gradient_of(segment, np.float32)
        if segment["residual"]:
            c = c + np.float32(decay) * residual_of(segment)
    next_residual_of(segment)[:] = c
    return not np.isfinite(c).all()


def largest_of(c: Floats, candidates: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.intp]:
    """Returns the `count` candidates of largest |c|, ties by lower index; candidates and result ascend."""
    if count >= len(candidates):
        return candidates
    descending = np.argsort(-np.abs(c[candidates]), kind="stable")
    return np.sort(candidates[descending[:count]])


# --- checks -------------------------------------------------------------------------------------------------


def check_vectors(table: SegmentTable, **vectors: tuple[Any, Any, bool]) -> None:
    """Checks the table, and vectors (array, dtype, written to), which have one item per row."""
    check_array("table", table, SEGMENT)
    for name, (array, dtype, writable) in vectors.items():
        check_array(name, array, dtype, writable=writable)
        check_aligned(**{name: array})
    for name, (array, dtype, _) in vectors.items():
        check_array(name, array, dtype, len(table))
    check_elements(table)
    require_rows(
        table, table["length"] <= MAX_LAYER_ELEMENTS, f"a layer has more than {MAX_LAYER_ELEMENTS} elements"
    )


def check_narrow(table: SegmentTable) -> None:
    """Raises ValueError for the first float64 row."""
    require_rows(table, table["dtype"] != FLOAT64, "selections are made from float32 and half precision")


def check_next_residuals(table: SegmentTable) -> None:
    """Raises ValueError for the first row with elements and no next residual."""
    require_rows(
        table, (table["next_residual"] != 0) | (table["length"] == 0), "the row has no next residual"
    )


def check_counts(table: SegmentTable, counts: Sizes) -> None:
    """Raises ValueError for the first row with fewer elements than its count."""
    require_rows(table, (counts >= 0) & (counts <= table["length"]), "the count is not in 0..length")


def check_places(
    table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, values: Floats, *, writable: bool
) -> None:
    """Checks the flat arrays, and that all selections lie inside them."""
    check_array("indices", indices, np.uint32, writable=writable)
    check_array("values", values, np.float32, writable=writable)
    check_aligned(indices=indices, values=values)
    check_inside(table, offsets, counts, min(len(indices), len(values)))


def check_inside(table: SegmentTable, offsets: Sizes, counts: Sizes, capacity: int) -> None:
    """Raises ValueError for the first row whose selection does not lie inside arrays of ``capacity`` items."""
    # Written as a difference: the sum of a hostile offset and a count could wrap.
    require_rows(
        table,
        (offsets >= 0) & (counts >= 0) & (counts <= capacity) & (offsets <= capacity - counts),
        f"the selection does not lie inside arrays of {capacity} items",
    )


def _check_selections(
    table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, values: Floats, *, writable: bool
) -> None:
    check_array("indices", indices, np.uint32)
    check_array("values", values, np.float32, writable=writable)
    check_vectors(table, offsets=(offsets, np.int64, False), counts=(counts, np.int64, False))
    check_next_residuals(table)
    check_places(table, offsets, counts, indices, values, writable=False)
    for i, segment in enumerate(table):
        chosen = indices[int(offsets[i]) : int(offsets[i] + counts[i])]
        if (chosen >= segment["length"]).any():
            raise ValueError(f"an index is not below the row's length: {segment}")
