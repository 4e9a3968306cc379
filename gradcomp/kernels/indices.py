"""The kernels of sparse contributions code index lists, and scatter the mean of such lists into dense outputs.

`reference_indices` defines and documents the kernels and the codings, whose names are repeated here.
"""

from __future__ import annotations

from gradcomp.kernels import reference_indices as reference
from gradcomp.kernels.dispatch import kernel
from gradcomp.kernels.reference_indices import (
    ALL,
    BITMAP,
    MAX_INDEXED,
    PACKED,
    RAW,
    index_bytes,
    smallest_coding,
)
from gradcomp.kernels.segments import Bytes, Floats, Indices, SegmentTable, Sizes

__all__ = [
    "ALL",
    "BITMAP",
    "MAX_INDEXED",
    "PACKED",
    "RAW",
    "decode_indices",
    "encode_indices",
    "index_bytes",
    "scatter_mean",
    "scatter_values",
    "smallest_coding",
]

encode_indices = kernel(reference.encode_indices)
decode_indices = kernel(reference.decode_indices)
scatter_mean = kernel(reference.scatter_mean)


def scatter_values(
    table: SegmentTable,
    flags: Bytes,
    offsets: Sizes,
    counts: Sizes,
    indices: Indices,
    values: Floats,
    *,
    divisor: float,
    scale: float,
) -> None:
    """Writes output = (value / divisor) * scale at the indices and 0 elsewhere.

    The indices of a row are the same on all ranks, and its values are sums over ranks. The call is `scatter_mean` with
    one list per row, so `offsets` and `counts` have shape (rows,). Flagged rows are filled with NaN, as there.
    """
    scatter_mean(table, flags, offsets[None], counts[None], indices, values, divisor=divisor, scale=scale)
