"""The kernels in NumPy: this file defines what every other body computes, byte for byte.

Arithmetic is float32 (float64 for codec FP64), rounded to nearest even, every product and sum on its own;
NumPy evaluates the expressions below exactly as they are written. Functions work one segment at a time and on
all buckets of a segment at once. Read `segments` first for the table and the layout of a payload.

Encoders work on contributions c = scale * gradient + decay * residual, and give the value v that a decoder
will see, so that the new residual is c - v.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import philox
from gradcomp.kernels.arguments import Draw
from gradcomp.kernels.quantisers import QUANTISER, Codes, Floats, Level
from gradcomp.kernels.segments import (
    BF16,
    BFLOAT16,
    DTYPES,
    FLOAT32,
    FLOAT64,
    FP16,
    FP32,
    FP64,
    QUANTISERS,
    SEGMENT,
    STOCHASTIC,
    Bytes,
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
    """Encode c = scale * gradient + decay * residual into the payload, and write next residual = c - decoded value.

    A segment with a non-finite c, or whose scale record would not be finite, gets its flag set and a payload
    of zero bytes; its next residual is unspecified then.

    Args:
        codec: one of the codec numbers of `segments`.
        table: SEGMENT rows; reads gradient, residual; writes next residual.
        payload: uint8, written at each row's offset.
        flags: uint8, one per row; only ORed into.
        draw: rounds stochastically (codecs in `segments.STOCHASTIC` only); None: to nearest.
        scale: factor of the gradient.
        decay: factor of the residual.
        magnitudes: what a codebook codec needs, and no other takes (see `segments.Magnitudes`).

    Raises:
        TypeError: an array of the wrong dtype, or not contiguous.
        ValueError: a malformed row, one that does not lie inside the payload, or magnitudes out of order.
    """
    _check_call(codec, table, flags, (payload,), magnitudes, writable=True)
    sizes = wire_bytes_table(codec, table)
    for i, segment in enumerate(table):
        number = _number_type(codec)
        with np.errstate(all="ignore"):
            contribution = number(scale) * _gradient(segment, number)
            if segment["residual"]:
                contribution = contribution + number(decay) * _residual(segment).astype(number)
        draws = _draws(segment, codec, draw)
        target = payload[segment["payload"] : segment["payload"] + sizes[i]]
        flags[i] |= _encode_segment(codec, segment, contribution, draws, magnitudes, target)


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
    """Write output = (value / divisor) * scale, rounded to the segment's dtype.

    A segment whose flag is set on entry is filled with NaN. A segment that decodes to something not finite in
    its dtype gets its flag set; for the quantising codecs that is judged by the extreme codes of each bucket,
    whether or not they occur. Rows without an output are skipped, unchecked.

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
        output = _view(segment["output"], segment["length"], dtype)
        if flags[i]:
            output[:] = np.nan
            continue
        source = payload[segment["payload"] : segment["payload"] + size]
        output[:] = finish(_decode_segment(codec, segment, source, magnitudes), dtype)
        judged = (
            finish(_extremes(codec, segment, source, magnitudes), dtype) if codec in QUANTISERS else output
        )
        flags[i] |= not _all_finite(judged)


def decode_add(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    *,
    scale: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Add value * scale to the float32 output. Rows without an output are skipped, unchecked.

    Args:
        codec: as in `encode`.
        table: SEGMENT rows; reads and writes output.
        payload: uint8, read at each row's offset.
        scale: factor of the value.
        magnitudes: as in `encode`.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError for an output that is not float32.
    """
    rows = table[table["output"] != 0]
    _check_call(codec, rows, None, (payload,), magnitudes, writable=False)
    if (rows["dtype"] != FLOAT32).any():
        raise ValueError("decode_add adds to float32 outputs only")
    for segment, size in zip(rows, wire_bytes_table(codec, rows), strict=True):
        output = _view(segment["output"], segment["length"], DTYPES[FLOAT32])
        source = payload[segment["payload"] : segment["payload"] + size]
        with np.errstate(all="ignore"):
            output += _decode_segment(codec, segment, source, magnitudes) * np.float32(scale)


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
    """Encode the mean of several payloads: c = (value_0 + value_1 + ...) / divisor + decay * residual.

    A chunk's owner draws with rank `segments.OWNER_RANK`, so that it does not matter who owns what; a rank that adds to
    what others sent, and passes it on, draws with its own. Next residual and flags are as in `encode`; gradient and
    output are not used.

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
    number = _number_type(codec)
    for i, segment in enumerate(table):
        place = slice(segment["payload"], segment["payload"] + sizes[i])
        with np.errstate(all="ignore"):
            total = _decode_segment(codec, segment, payloads[0][place], magnitudes)
            for payload in payloads[1:]:
                total = total + _decode_segment(codec, segment, payload[place], magnitudes)
            contribution = total / number(divisor)
            if segment["residual"]:
                contribution = contribution + number(decay) * _residual(segment).astype(number)
        draws = _draws(segment, codec, draw)
        flags[i] |= _encode_segment(codec, segment, contribution, draws, magnitudes, out[place])


def nonzero(table: SegmentTable, out: Bytes) -> None:
    """out[i] = 1 if any gradient element of segment i is not zero (NaN is not), else 0.

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
        out[i] = bool(np.any(_gradient(segment, np.float64) != 0))


# --- one segment --------------------------------------------------------------------------------------------


def _encode_segment(
    codec: int,
    segment: np.void,
    contribution: npt.NDArray[Any],
    draws: Floats | None,
    magnitudes: Magnitudes | None,
    target: Bytes,
) -> bool:
    """Write a segment's payload and next residual; return whether it is non-finite."""
    with np.errstate(all="ignore"):
        if codec in QUANTISERS:
            encoded = _encode_quantised(codec, segment, contribution, draws, magnitudes)
        elif codec == FP16:
            encoded = _encode_fp16(segment, contribution)
        else:
            encoded = _encode_cast(codec, contribution)
        if encoded is None or not _all_finite(contribution):
            target[:] = 0
            return True
        target[:], value = encoded
        if segment["next_residual"]:
            next_residual = _view(segment["next_residual"], segment["length"], DTYPES[FLOAT32])
            next_residual[:] = contribution - value
    return False


def _decode_segment(
    codec: int, segment: np.void, source: Bytes, magnitudes: Magnitudes | None
) -> npt.NDArray[Any]:
    """Values of a segment: float32, or float64 for FP64."""
    with np.errstate(all="ignore"):
        if codec in QUANTISERS:
            scales, codes = _split_quantised(codec, segment, source)
            lengths = _bucket_lengths(segment)
            per_element = [np.repeat(column, lengths) for column in scales]
            return QUANTISER[codec].dequantise(codes, per_element, Level.of(segment, magnitudes))
        if codec == FP16:
            factors, halves = _split_fp16(segment, source)
            return halves.astype(np.float32) * np.repeat(factors, _bucket_lengths(segment))
        return source.view(_CAST[codec]).astype(_number_type(codec))


def _extremes(codec: int, segment: np.void, source: Bytes, magnitudes: Magnitudes | None) -> Floats:
    """Per bucket, values that are all finite only if every code of the bucket decodes to something finite."""
    scales, _ = _split_quantised(codec, segment, source)
    with np.errstate(all="ignore"):
        return QUANTISER[codec].extremes(scales, Level.of(segment, magnitudes))


def _encode_quantised(
    codec: int,
    segment: np.void,
    contribution: Floats,
    draws: Floats | None,
    magnitudes: Magnitudes | None,
) -> tuple[Bytes, Floats] | None:
    """Payload and decoded values of a segment, or None if a bucket's scale record is not finite."""
    level = Level.of(segment, magnitudes)
    quantiser = QUANTISER[codec]
    scales: list[Floats] = []
    codes: list[Codes] = []
    values: list[Floats] = []
    for bucket in _equal_buckets(segment):
        c = contribution[bucket].reshape(-1, _bucket_size(segment, bucket))
        u = None if draws is None else draws[bucket].reshape(c.shape)
        record, code = quantiser.quantise(c, u, level)
        scales.append(np.stack(record, axis=-1).reshape(-1))
        codes.append(code.reshape(-1))
        values.append(quantiser.dequantise(code, [column[:, None] for column in record], level).reshape(-1))
    if not scales:
        return np.empty(0, np.uint8), np.empty(0, np.float32)
    all_scales = np.concatenate(scales)
    if not _all_finite(all_scales):
        return None
    payload = np.concatenate((all_scales.view(np.uint8), pack_bits(np.concatenate(codes), level.bits)))
    return payload, np.concatenate(values)


def _encode_fp16(segment: np.void, contribution: Floats) -> tuple[Bytes, Floats]:
    factors: list[Floats] = []
    halves: list[npt.NDArray[np.float16]] = []
    values: list[Floats] = []
    for bucket in _equal_buckets(segment):
        c = contribution[bucket].reshape(-1, _bucket_size(segment, bucket))
        factor, inverse = _fp16_factors(np.abs(c).max(axis=1))
        half = (c * inverse[:, None]).astype(np.float16)
        factors.append(factor)
        halves.append(half.reshape(-1))
        values.append((half.astype(np.float32) * factor[:, None]).reshape(-1))
    if not factors:
        return np.empty(0, np.uint8), np.empty(0, np.float32)
    payload = np.concatenate((np.concatenate(factors).view(np.uint8), np.concatenate(halves).view(np.uint8)))
    return payload, np.concatenate(values)


def _fp16_factors(largest: Floats) -> tuple[Floats, Floats]:
    """Normal powers of two 2**e and 2**-e with largest * 2**-e in [2**14, 2**15); 1 where it is 0."""
    exponent = (largest.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127
    e = np.maximum(exponent - 14, -126)
    e[largest == 0] = 0
    return np.ldexp(np.float32(1), e), np.ldexp(np.float32(1), -e)


def _encode_cast(codec: int, contribution: npt.NDArray[Any]) -> tuple[Bytes, npt.NDArray[Any]] | None:
    cast = contribution.astype(_CAST[codec])
    if not _all_finite(cast):
        return None
    return cast.view(np.uint8), cast.astype(contribution.dtype)


# --- payloads -----------------------------------------------------------------------------------------------


def pack_bits(codes: Codes, bits: int) -> Bytes:
    """The bit stream of codes below 2**bits, padded with zero bits to whole bytes."""
    return np.packbits(
        np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little"), bitorder="little"
    )


def unpack_bits(stream: Bytes, bits: int, length: int) -> Codes:
    """The first `length` codes of a bit stream."""
    code_bits = np.unpackbits(stream, count=length * bits, bitorder="little").reshape(length, bits)
    return np.packbits(code_bits, axis=1, bitorder="little")[:, 0]


def _split_quantised(codec: int, segment: np.void, source: Bytes) -> tuple[list[Floats], Codes]:
    columns = QUANTISER[codec].columns
    buckets = len(_bucket_lengths(segment))
    records = source[: 4 * columns * buckets].view("<f4").reshape(buckets, columns)
    codes = unpack_bits(source[4 * columns * buckets :], int(segment["bits"]), int(segment["length"]))
    return [records[:, k] for k in range(columns)], codes


def _split_fp16(segment: np.void, source: Bytes) -> tuple[Floats, npt.NDArray[np.float16]]:
    buckets = len(_bucket_lengths(segment))
    return source[: 4 * buckets].view("<f4"), source[4 * buckets :].view("<f2")


_CAST: dict[int, np.dtype[Any]] = {FP32: DTYPES[FLOAT32], BF16: DTYPES[BFLOAT16], FP64: DTYPES[FLOAT64]}


def _bucket_lengths(segment: np.void) -> npt.NDArray[np.int64]:
    length, bucket_size = int(segment["length"]), int(segment["bucket_size"])
    lengths = np.full(-(-length // bucket_size), bucket_size, np.int64)
    if length % bucket_size:
        lengths[-1] = length % bucket_size
    return lengths


def _equal_buckets(segment: np.void) -> list[slice]:
    """The whole buckets of a segment, and the shorter last one, as far as they exist."""
    length, bucket_size = int(segment["length"]), int(segment["bucket_size"])
    border = length - length % bucket_size
    return [part for part in (slice(0, border), slice(border, length)) if part.start < part.stop]


def _bucket_size(segment: np.void, part: slice) -> int:
    return min(int(segment["bucket_size"]), int(part.stop - part.start))


# --- memory and checks --------------------------------------------------------------------------------------


def _view(address: int, length: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if length == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * (int(length) * dtype.itemsize)).from_address(int(address))
    view: npt.NDArray[Any] = np.frombuffer(memoryview(memory).cast("B"), np.uint8).view(dtype)
    return view


def _gradient(segment: np.void, number: Any) -> npt.NDArray[Any]:
    """To be read only: it may be the gradient itself."""
    if not segment["gradient"]:
        return np.zeros(int(segment["length"]), number)
    return _view(segment["gradient"], segment["length"], DTYPES[segment["dtype"]]).astype(number, copy=False)


def _residual(segment: np.void) -> Floats:
    return _view(segment["residual"], segment["length"], DTYPES[FLOAT32])


def _number_type(codec: int) -> Any:
    return np.float64 if codec == FP64 else np.float32


def _draws(segment: np.void, codec: int, draw: Draw | None) -> Floats | None:
    if draw is None or codec not in STOCHASTIC:
        return None
    return philox.uniform(
        int(segment["start"]),
        int(segment["length"]),
        seed=draw.seed,
        layer=int(segment["layer"]),
        step=draw.step,
        rank=draw.rank,
    )


def _all_finite(values: npt.NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all())


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
