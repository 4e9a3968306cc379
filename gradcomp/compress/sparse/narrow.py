"""Narrowing: what was selected is compressed further, without another look at the layer."""

from __future__ import annotations

import numpy as np

from gradcomp.compress.sparse.payload import Selection
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Sizes
from gradcomp.kernels.segments import FLOAT32, SEGMENT


def narrow(chosen: Selection, counts: Sizes) -> Selection:
    """Of the selected elements of every row the ``counts[i]`` largest, ties to the lower index.

    Selecting at one density and narrowing to a lower one gives exactly what selecting at the lower one gives, for
    selections of the largest (TopK with zeros; without them, of as many as were selected): the n elements need not be
    read again. ``chosen`` stays as it is.

    Args:
        chosen: selections of any rows, with finite values.
        counts: int64, one per row, in 0..chosen.counts[i]; ``elements_at(density, lengths)`` for a density.

    Raises:
        ValueError: a count is negative or more than were selected.

    Source: multi-level compression of GraVAC (Tyagi and Swany 2023, section IV-C), which compresses to theta_min and
    then further.
    """
    if ((counts < 0) | (counts > chosen.counts)).any():
        raise ValueError(f"counts {counts} are not in 0..{chosen.counts}")
    narrowed = Selection.allocate(counts)
    room = np.empty(len(chosen.values), dtype=np.float32)
    table = np.zeros(len(counts), dtype=SEGMENT)
    table["length"], table["dtype"] = chosen.counts, FLOAT32
    table["gradient"] = chosen.values.ctypes.data + 4 * chosen.offsets
    table["next_residual"] = room.ctypes.data + 4 * chosen.offsets
    selection.select_top(
        table,
        np.zeros(len(table), dtype=np.uint8),
        np.ones(len(table), dtype=np.float32),
        narrowed.counts,
        narrowed.offsets,
        narrowed.indices,
        narrowed.values,
        narrowed.counts,
        decay=1.0,
        zeros=True,
    )
    # The kernel counts from the first selected element of a row.
    narrowed.indices[:] = chosen.indices[narrowed.indices + np.repeat(chosen.offsets, counts)]
    return narrowed
