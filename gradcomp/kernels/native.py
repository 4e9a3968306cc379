"""The kernels in C++: the functions of `reference`, with the same signatures and the same bytes.

The extension does its own checks; only the table changes its type on the way, because the boundary knows no
structured arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp import _native
from gradcomp.kernels.segments import SEGMENT, Bytes, SegmentTable, check_array


def _rows(table: SegmentTable) -> Bytes:
    check_array("table", table, SEGMENT)
    return table.view(np.uint8)


def encode(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    flags: Bytes,
    *,
    stochastic: bool,
    seed: int,
    step: int,
    rank: int,
    scale: float,
    decay: float,
) -> None:
    """As `reference.encode`."""
    _native.encode(
        codec,
        _rows(table),
        payload,
        flags,
        stochastic=stochastic,
        seed=seed,
        step=step,
        rank=rank,
        scale=scale,
        decay=decay,
    )


def decode(
    codec: int, table: SegmentTable, payload: Bytes, flags: Bytes, *, divisor: float, scale: float
) -> None:
    """As `reference.decode`."""
    _native.decode(codec, _rows(table), payload, flags, divisor=divisor, scale=scale)


def decode_add(codec: int, table: SegmentTable, payload: Bytes, *, scale: float) -> None:
    """As `reference.decode_add`."""
    _native.decode_add(codec, _rows(table), payload, scale=scale)


def reduce(
    codec: int,
    table: SegmentTable,
    payloads: Sequence[Bytes],
    out: Bytes,
    flags: Bytes,
    *,
    stochastic: bool,
    seed: int,
    step: int,
    divisor: float,
    decay: float,
) -> None:
    """As `reference.reduce`."""
    _native.reduce(
        codec,
        _rows(table),
        list(payloads),
        out,
        flags,
        stochastic=stochastic,
        seed=seed,
        step=step,
        divisor=divisor,
        decay=decay,
    )


def nonzero(table: SegmentTable, out: Bytes) -> None:
    """As `reference.nonzero`."""
    _native.nonzero(_rows(table), out)
