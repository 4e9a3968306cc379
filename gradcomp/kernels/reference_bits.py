"""Bits by quantisation bucket in NumPy: how many bits each bucket of a segment takes. Part of `reference`.

Min-max rounding of n values over a range R = hi - lo in steps of R / (2^b - 1) has the expected squared error
n R^2 e(b), e(b) = c / (2^b - 1)^2. c is 1/6 where values are spread evenly between two steps and 1/4 at most; one bit
takes 1/4, as most values then lie in the middle. The bits of a segment, which is one layer's part within a chunk, are
chosen together: one bit more is worth R^2 (e(b) - e(b + 1)) for each value, so bucket k takes bit b + 1 where that is
above a threshold that all buckets of the segment share.

Every backend finds the same threshold. R is represented by its *class*, the power of two and 5 bits of mantissa: 32
classes to an octave. Buckets of a class have the same bits. Sums over a class are of whole numbers, so their order
does not matter; sums over classes are float64, largest ranges first.

Payload of a segment: ``[lo and unit, 8 bytes a bucket][bits, 1 byte a bucket][codes]``. The codes of a bucket take
whole groups of eight codes, b bytes each, so that every bucket begins at a byte. The rest of the segment's payload is
zero.

Where the sizes of messages are announced, payloads travel without their unused ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import (
    ALLOCATED,
    MINMAX_LEAST_BYTES,
    RECORD_OF_ALLOCATED,
    SEGMENT,
    Bytes,
    Floats,
    SegmentTable,
    Sizes,
    check_array,
    check_table,
    groups_of,
    wire_bytes_table,
)

MOST_BITS: Final = 8
CLASSES: Final = 512
"""The number of distinct classes, from the largest range of a segment down: 16 octaves."""

ERRORS: Final = np.array([0.0] + [(3.0 if b == 1 else 2.0) / ((1 << b) - 1) ** 2 for b in range(1, 9)])
"""12 e(b), for b = 1 to 8."""

STEPS: Final = (0, 63, 103, 139, 173, 205, 238)
"""The classes above the threshold for two bits at which a bucket gets 2, 3, ... 8 bits. It gets b + 1 bits from
16 log2((e(1) - e(2)) / (e(b) - e(b + 1))) classes on."""

MOST_SHIFT: Final = STEPS[-1] + CLASSES - 1
"""The shift at which all classes have 8 bits; at -1 all have one bit."""


def choose_bits(codec: int, span: Floats, groups: Sizes, level: int) -> npt.NDArray[np.uint8]:
    """Returns the bits of every bucket, from its range and its number of groups of eight values. All ranges are finite.

    MINMAX_LEAST_BYTES: the fewest bits whose error is at most that of ``level`` bits for all. MINMAX_LEAST_ERROR: the
    least error at no more bytes than ``level`` bits for all take. Both minimise over the shared threshold only. If the
    minimum is no better than ``level`` bits for all, all buckets get ``level`` bits. A range that is 0, or too small to
    be divided by, takes no bits.
    """
    bits = np.zeros(len(span), dtype=np.uint8)
    varying = ~is_flat(span)
    if not varying.any():
        return bits
    words = span[varying].view(np.uint32).astype(np.int64)
    classes = words >> 18
    largest = int(classes.max())
    depth = np.minimum(largest - classes, CLASSES - 1)
    mantissa = ((words & 0x7FFFFF) | 0x800000) >> 11
    weights = np.zeros(CLASSES, dtype=np.int64)
    counts = np.zeros(CLASSES, dtype=np.int64)
    np.add.at(weights, depth, groups[varying] * mantissa * mantissa)
    np.add.at(counts, depth, groups[varying])
    weights[-1] = 0  # the last class's errors are below 2^-32 of the largest class's
    used = np.flatnonzero(counts)
    octaves = (largest >> 5) - ((largest - used) >> 5)
    weight = np.ldexp(weights[used].astype(np.float64), -2 * octaves)
    budget = int(groups.sum()) * level
    shift = _shift(codec, used, weight, counts[used], level, budget)
    bits[varying] = level if shift is None else bits_at(shift - depth)
    return bits


def is_flat(span: Floats) -> npt.NDArray[np.bool_]:
    """Returns which ranges are too small to be divided into steps."""
    return span < np.float32(2.0**-119)


def bits_at(above: npt.NDArray[Any]) -> Sizes:
    """Returns the bits of buckets that are ``above`` classes above the threshold for two bits."""
    found: Sizes = 1 + np.searchsorted(np.array(STEPS), above, side="right")
    return found


def _shift(codec: int, used: Sizes, weight: Any, counts: Sizes, level: int, budget: int) -> int | None:
    """Returns how many classes the largest range is above the threshold for two bits; None: all take ``level``."""
    uniform = _error(weight, np.full(len(used), level))
    if codec == MINMAX_LEAST_BYTES:
        # The least shift whose error is at most that of ``level`` bits.
        low = -1 + bisect_left(
            range(-1, MOST_SHIFT), True, key=lambda shift: _error(weight, bits_at(shift - used)) <= uniform
        )
        better = int((counts * bits_at(low - used)).sum()) < int(counts.sum()) * level
        return low if better else None
    # The largest shift whose bytes are within the budget.
    low = -1 + bisect_right(
        range(MOST_SHIFT + 1), budget, key=lambda shift: int((counts * bits_at(shift - used)).sum())
    )
    return low if _error(weight, bits_at(low - used)) < uniform else None


def _error(weight: Any, bits: Sizes) -> float:
    """Sums the errors in float64, one after another from the largest range on."""
    total = 0.0
    for product in (weight * ERRORS[bits]).tolist():
        total = total + product
    return total


def bucket_lengths(segment: np.void) -> Sizes:
    """Returns the number of values in every bucket of a segment."""
    length, size = int(segment["length"]), int(segment["bucket_size"])
    return np.diff(np.arange(0, length, size, dtype=np.int64), append=length)


def group_counts(segment: np.void) -> Sizes:
    """Returns the groups of eight values in every bucket of a segment."""
    groups: Sizes = groups_of(bucket_lengths(segment))
    return groups


def split_allocated(segment: np.void, source: Bytes) -> tuple[Floats, Bytes, Sizes] | None:
    """Returns records, bits, and where each bucket's codes begin; None unless all lie inside the source."""
    groups = group_counts(segment)
    buckets = len(groups)
    begin = RECORD_OF_ALLOCATED * buckets
    bits = source[8 * buckets : begin]
    ends = begin + np.cumsum(groups * bits)
    if (bits > MOST_BITS).any() or (buckets and ends[-1] > len(source)):
        return None
    return source[: 8 * buckets].view("<f4").reshape(buckets, 2), bits, ends - groups * bits


def used_bytes(segment: np.void, source: Bytes) -> int | None:
    """Returns the bytes of a payload without the zeros at its end; None if its bits are impossible."""
    split = split_allocated(segment, source)
    if split is None:
        return None
    _, bits, begins = split
    return int(begins[-1] + group_counts(segment)[-1] * bits[-1]) if len(bits) else 0


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
