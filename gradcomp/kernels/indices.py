"""Sparse contributions: the coding of index lists, and the mean of lists scattered over dense outputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import bodies
from gradcomp.kernels.codings import (
    ALL,
    BITMAP,
    MAX_INDEXED,
    PACKED,
    RAW,
    Codings,
    Indices,
    Sizes,
    index_bytes,
    smallest_coding,
)
from gradcomp.kernels.segments import Bytes, SegmentTable

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


def encode_indices(
    codings: Codings,
    lengths: Sizes,
    counts: Sizes,
    offsets: Sizes,
    indices: Indices,
    places: Sizes,
    payload: Bytes,
) -> None:
    """Encode index lists; see `reference_indices.encode_indices`."""
    bodies.active().encode_indices(codings, lengths, counts, offsets, indices, places, payload)


def decode_indices(
    codings: Codings,
    lengths: Sizes,
    counts: Sizes,
    offsets: Sizes,
    indices: Indices,
    places: Sizes,
    payload: Bytes,
) -> None:
    """Decode index lists that came from the network; see `reference_indices.decode_indices`."""
    bodies.active().decode_indices(codings, lengths, counts, offsets, indices, places, payload)


def scatter_mean(
    table: SegmentTable,
    flags: Bytes,
    offsets: Sizes,
    counts: Sizes,
    indices: Indices,
    values: npt.NDArray[np.float32],
    *,
    divisor: float,
    scale: float,
) -> None:
    """Write the mean of each rank's sparse values; see `reference_indices.scatter_mean`."""
    bodies.active().scatter_mean(table, flags, offsets, counts, indices, values, divisor=divisor, scale=scale)


def scatter_values(
    table: SegmentTable,
    flags: Bytes,
    offsets: Sizes,
    counts: Sizes,
    indices: Indices,
    values: npt.NDArray[np.float32],
    *,
    divisor: float,
    scale: float,
) -> None:
    """Write output = (value / divisor) * scale at the indices and 0 elsewhere.

    One list per row, the same on all ranks, with values that are summed already: `scatter_mean` of one rank, with
    `offsets` and `counts` of shape (rows,).
    """
    scatter_mean(table, flags, offsets[None], counts[None], indices, values, divisor=divisor, scale=scale)
