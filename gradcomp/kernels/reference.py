"""The codecs' kernels in NumPy. They define, byte for byte, what every other backend computes.

Arithmetic is float32 (float64 for codec FP64). Each product and each sum is rounded to nearest even on its own, without
fused multiply-add: NumPy evaluates the expressions exactly as they are written. Read `segments` first for the table
and the layout of a payload. `reference_codes` encodes and decodes one segment; other `reference_*` modules define
the other kernels.

Encoders work on contributions c = scale * gradient + decay * residual. They also compute the value v that a decoder
will obtain, so that the new residual is c - v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import philox
from gradcomp.kernels.reference_codes import decode_segment, encode_segment, extremes, number_type
from gradcomp.kernels.reference_memory import all_finite, gradient_of, memory_at, residual_of
from gradcomp.kernels.segments import (
    DTYPES,
    FLOAT32,
    MINMAX_SHIFT,
    QUANTISERS,
    SEGMENT,
    STOCHASTIC,
    Bytes,
    Draw,
    Magnitudes,
    SegmentTable,
    check_array,
    check_elements,
    check_magnitudes,
    check_table,
    wire_bytes_table,
)


def encode(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    flags: Bytes,
    *,
    draw: Draw | None,
    scale: float,
    decay: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Encodes c = scale * gradient + decay * residual into the payload, and writes next residual = c - decoded value.

    If c, a scale record or a cast value of a segment is not finite, its flag is set and its payload is zero bytes; its
    next residual is unspecified then.

    Args:
        codec: one of the codec numbers of `segments`.
        table: SEGMENT rows; reads gradient, residual; writes next residual.
        payload: uint8, written at each row's offset.
        flags: uint8, one per row; only ORed into.
        draw: the random numbers of codecs in `segments.STOCHASTIC`, which round stochastically, break ties (VOTE) or
            shift the lattice (MINMAX_SHIFT); others ignore it. None: to nearest, without a shift.
        scale: factor of the gradient.
        decay: factor of the residual.
        magnitudes: required by codebook codecs, None for all others (see `segments.Magnitudes`).

    Raises:
        TypeError: an array of the wrong dtype, or not contiguous.
        ValueError: a malformed row, one that does not lie inside the payload, or magnitudes out of order.
    """
    _check_call(codec, table, flags, (payload,), magnitudes, writable=True)
    sizes = wire_bytes_table(codec, table)
    number = number_type(codec)
    for i, segment in enumerate(table):
        with np.errstate(all="ignore"):
            contribution = number(scale) * gradient_of(segment, number)
        target = payload[segment["payload"] : segment["payload"] + sizes[i]]
        flags[i] |= _encode(codec, segment, contribution, draw, decay, magnitudes, target)


def decode(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    flags: Bytes,
    *,
    divisor: float,
    scale: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Writes output = (value / divisor) * scale, rounded to the segment's dtype.

    A segment whose flag is set on entry is filled with NaN. If a decoded value is not finite in the segment's dtype,
    its flag is set; for codecs in `segments.QUANTISERS` the extreme codes of each bucket decide, even if no element has
    them. Rows without an output are skipped, unchecked.

    Args:
        codec: as in `encode`.
        table: SEGMENT rows; writes output.
        payload: uint8, read at each row's offset.
        flags: uint8, one per row; read, and ORed into.
        divisor: number of ranks, or 1 for a payload that holds the mean.
        scale: factor of the result.
        magnitudes: as in `encode`.

    Raises:
        TypeError, ValueError: as in `encode`.
    """
    rows = table["output"] != 0
    _check_call(codec, table, flags, (payload,), magnitudes, checked=rows, writable=False)
    sizes = wire_bytes_table(codec, table[rows])

    def finish(value: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        number = value.dtype.type
        with np.errstate(all="ignore"):
            result: npt.NDArray[Any] = (value / number(divisor) * number(scale)).astype(dtype)
            return result

    for i, size in zip(np.flatnonzero(rows), sizes, strict=True):
        segment = table[i]
        dtype = DTYPES[segment["dtype"]]
        output = memory_at(segment["output"], segment["length"], dtype)
        if flags[i]:
            output[:] = np.nan
            continue
        source = payload[segment["payload"] : segment["payload"] + size]
        output[:] = finish(decode_segment(codec, segment, source, magnitudes), dtype)
        judged = (
            finish(extremes(codec, segment, source, magnitudes), dtype) if codec in QUANTISERS else output
        )
        flags[i] |= not all_finite(judged)


def decode_add(
    codec: int, table: SegmentTable, payload: Bytes, *, scale: float, magnitudes: Magnitudes | None = None
) -> None:
    """Adds value * scale to the float32 output. Rows without an output are skipped, unchecked.

    Args:
        codec: as in `encode`.
        table: SEGMENT rows; reads and writes output.
        payload: uint8, read at each row's offset.
        scale: factor of the value.
        magnitudes: as in `encode`.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError for an output that is not float32.
    """
    written = table["output"] != 0
    _check_call(codec, table, None, (payload,), magnitudes, checked=written, writable=False)
    rows = table[written]
    if (rows["dtype"] != FLOAT32).any():
        raise ValueError("decode_add adds to float32 outputs only")
    for segment, size in zip(rows, wire_bytes_table(codec, rows), strict=True):
        output = memory_at(segment["output"], segment["length"], DTYPES[FLOAT32])
        source = payload[segment["payload"] : segment["payload"] + size]
        with np.errstate(all="ignore"):
            output += decode_segment(codec, segment, source, magnitudes) * np.float32(scale)


def reduce(
    codec: int,
    table: SegmentTable,
    payloads: Sequence[Bytes],
    out: Bytes,
    flags: Bytes,
    *,
    draw: Draw | None,
    divisor: float,
    decay: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Encodes the mean of several payloads: c = (value_0 + value_1 + ...) / divisor + decay * residual.

    A chunk's owner draws with rank `segments.OWNER_RANK`, so that results do not depend on who owns which chunk; a
    rank that forwards a partial sum draws with its own rank. Next residual and flags are
    as in `encode`; gradient and output are not used.

    Args:
        codec: as in `encode`.
        table: SEGMENT rows; reads residual; writes next residual.
        payloads: at least one, all of the table's layout; added in this order.
        out: uint8, written at the same offsets; must not overlap a payload.
        flags: uint8, one per row; only ORed into.
        draw: as in `encode`.
        divisor: number of ranks, or 1 to encode the sum.
        decay: factor of the residual.
        magnitudes: as in `encode`.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError without a payload, or when out overlaps one.
    """
    _check_call(codec, table, flags, (out,), magnitudes, writable=True)
    _check_call(codec, table, flags, payloads, magnitudes, writable=False)
    if not payloads:
        raise ValueError("reduce needs at least one payload")
    if any(np.may_share_memory(out, payload) for payload in payloads):
        raise ValueError("out overlaps a payload")
    sizes = wire_bytes_table(codec, table)
    number = number_type(codec)
    for i, segment in enumerate(table):
        place = slice(segment["payload"], segment["payload"] + sizes[i])
        with np.errstate(all="ignore"):
            total = decode_segment(codec, segment, payloads[0][place], magnitudes)
            for payload in payloads[1:]:
                total = total + decode_segment(codec, segment, payload[place], magnitudes)
            contribution = total / number(divisor)
        flags[i] |= _encode(codec, segment, contribution, draw, decay, magnitudes, out[place])


def nonzero(table: SegmentTable, out: Bytes) -> None:
    """Writes out[i] = 1 if segment i has a gradient element that is not zero (NaN counts as not zero), else 0.

    Args:
        table: SEGMENT rows; reads gradient.
        out: uint8, one per row.

    Raises:
        TypeError, ValueError: as in `encode`.
    """
    check_array("table", table, SEGMENT)
    check_array("out", out, np.uint8, len(table), writable=True)
    check_elements(table)
    for i, segment in enumerate(table):
        out[i] = bool(np.any(gradient_of(segment, np.float64) != 0))


def _encode(
    codec: int,
    segment: np.void,
    contribution: npt.NDArray[Any],
    draw: Draw | None,
    decay: float,
    magnitudes: Magnitudes | None,
    target: Bytes,
) -> bool:
    """Adds the residual and encodes one row; returns True if it is not finite."""
    if segment["residual"]:
        number = number_type(codec)
        with np.errstate(all="ignore"):
            contribution = contribution + number(decay) * residual_of(segment).astype(number)
    draws = None
    if draw is not None and codec in STOCHASTIC:
        words: dict[str, int] = {"layer": int(segment["layer"]), **vars(draw)}
        if codec == MINMAX_SHIFT:
            draws = np.full(len(contribution), philox.shift(**words))
        else:
            draws = philox.uniform(int(segment["start"]), len(contribution), **words)
    return encode_segment(codec, segment, contribution, draws, magnitudes, target)


def _check_call(
    codec: int,
    table: SegmentTable,
    flags: Bytes | None,
    payloads: Sequence[Bytes],
    magnitudes: Magnitudes | None,
    *,
    checked: npt.NDArray[np.bool_] | slice = slice(None),
    writable: bool,
) -> None:
    check_array("table", table, SEGMENT)
    if flags is not None:
        check_array("flags", flags, np.uint8, len(table), writable=True)
    for payload in payloads:
        check_array("payload", payload, np.uint8, writable=writable)
    check_table(codec, table[checked], *(len(payload) for payload in payloads))
    check_magnitudes(codec, table[checked], magnitudes)
