"""narrow() compresses a selection further, without another pass over the layer."""

from __future__ import annotations

import numpy as np

from gradcomp.compress.sparse.payload import Selection
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Sizes
from gradcomp.kernels.segments import FLOAT32, SEGMENT


def narrow(chosen: Selection, counts: Sizes) -> Selection:
    """Return, of the selected elements of every row, the ``counts[i]`` largest, ties to the lower index.

    To select at one density and narrow to a lower one gives exactly the selection at the lower density, for selections
    of the largest elements (TopK with zeros; without them, of as many as were selected). The n elements are not read
    again, and ``chosen`` stays as it is.

    Args:
        chosen: selections of any rows, with finite values.
        counts: int64, one per row, in 0..chosen.counts[i]; ``elements_at(density, lengths)`` for a density.

    Raises:
        ValueError: a count is negative or more than were selected.

    Source: Tyagi and Swany 2023, section IV-C (multi-level compression), which compresses to theta_min and then
    further.
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
