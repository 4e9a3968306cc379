"""Payloads without what is left of their room, as they travel where sizes are announced; NumPy defines it."""

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
    """out <- what every row uses of its room in the payload, one behind the other; returns how many bytes.

    Args:
        codec: as in `encode`; only the codecs of `segments.ALLOCATED` leave anything out.
        table: SEGMENT rows.
        payload: uint8, read at each row's offset.
        out: uint8, as long as all rooms together or longer; must not overlap the payload.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError for a row that does not say how much it uses.
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
    """The inverse: every row to its room in the payload, with zeros behind it; returns how many bytes of it were read.

    Args:
        codec: as in `compact`.
        table: SEGMENT rows.
        source: uint8, what `compact` made and maybe more; must not overlap the payload.
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
    """What must be there before it says how much it uses."""
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
