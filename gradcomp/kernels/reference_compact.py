"""Payloads without their unused ends, for messages whose sizes are announced; NumPy defines them."""

from __future__ import annotations

import numpy as np

from gradcomp.kernels.reference_bits import used_bytes
from gradcomp.kernels.segments import (
    ALLOCATED,
    RECORD_OF_ALLOCATED,
    SEGMENT,
    Bytes,
    SegmentTable,
    check_array,
    check_table,
    wire_bytes_table,
)


def compact(codec: int, table: SegmentTable, payload: Bytes, out: Bytes) -> int:
    """Copies the used bytes of every row's payload to ``out``, one row after another; returns their number.

    Args:
        codec: as in `encode`; only the codecs of `segments.ALLOCATED` leave anything out.
        table: SEGMENT rows.
        payload: uint8, read at each row's offset.
        out: uint8, at least as long as all payloads of the table together; must not overlap the payload.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError for a row whose bits, and so its used bytes, are impossible.
    """
    _check(codec, table, payload, out, writable=(False, True))
    if len(out) < wire_bytes_table(codec, table).sum():
        raise ValueError("out is too short")
    at = 0
    for segment, room in zip(table, wire_bytes_table(codec, table).tolist(), strict=True):
        source = payload[int(segment["payload"]) :][:room]
        used = _used(codec, segment, source)
        out[at : at + used] = source[:used]
        at += used
    return at


def restore(codec: int, table: SegmentTable, source: Bytes, payload: Bytes) -> int:
    """Inverts `compact`: copies every row to its place in the payload and zeros the rest; returns the bytes read.

    Args:
        codec: as in `compact`.
        table: SEGMENT rows.
        source: uint8, the output of `compact`, possibly followed by more; must not overlap the payload.
        payload: uint8, written at each row's offset.

    Raises:
        TypeError, ValueError: as in `compact`; ValueError for a source that ends before the rows do.
    """
    _check(codec, table, payload, source, writable=(True, False))
    at = 0
    for segment, room in zip(table, wire_bytes_table(codec, table).tolist(), strict=True):
        rest = source[at:]
        least = _least(codec, segment, room)
        if least > len(rest):
            raise ValueError("the payloads end too early")
        padded = np.zeros(room, np.uint8)
        padded[: min(room, len(rest))] = rest[:room]
        used = _used(codec, segment, padded)
        if used > len(rest):
            raise ValueError("the payloads end too early")
        padded[used:] = 0
        payload[int(segment["payload"]) :][:room] = padded
        at += used
    return at


def _least(codec: int, segment: np.void, room: int) -> int:
    """Returns the bytes that must be there before the number of used bytes can be read from them."""
    if codec not in ALLOCATED:
        return room
    return RECORD_OF_ALLOCATED * -(-int(segment["length"]) // int(segment["bucket_size"]))


def _used(codec: int, segment: np.void, source: Bytes) -> int:
    used = used_bytes(segment, source) if codec in ALLOCATED else len(source)
    if used is None:
        raise ValueError("the bits of the buckets are not possible")
    return used


def _check(
    codec: int, table: SegmentTable, payload: Bytes, other: Bytes, *, writable: tuple[bool, bool]
) -> None:
    check_array("table", table, SEGMENT)
    check_array("payload", payload, np.uint8, writable=writable[0])
    check_array("out" if writable[1] else "source", other, np.uint8, writable=writable[1])
    check_table(codec, table, len(payload))
