"""AdaComp's selection in NumPy: this file defines what every other body computes, byte for byte.

Rows, contributions, selections and errors are those of `reference_selection`.
"""

from __future__ import annotations

import numpy as np

from gradcomp.kernels.reference_memory import gradient_of, next_residual_of
from gradcomp.kernels.reference_selection import (
    Floats,
    Indices,
    Numbers,
    check_narrow,
    check_next_residuals,
    check_places,
    check_vectors,
    largest_of,
)
from gradcomp.kernels.segments import SegmentTable


def select_adacomp(
    table: SegmentTable,
    factors: Floats,
    limits: Numbers,
    offsets: Numbers,
    indices: Indices,
    values: Floats,
    found: Numbers,
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
