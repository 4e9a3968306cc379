"""The kernels in NumPy: this file defines what every other body computes, byte for byte.

Arithmetic is float32 (float64 for codec FP64), rounded to nearest even, every product and sum on its own;
NumPy evaluates the expressions below exactly as they are written. Functions work one segment at a time and on
all buckets of a segment at once. Read `segments` first for the table and the layout of a payload.

Encoders work on contributions c = scale * gradient + decay * residual, and give the value v that a decoder
will see, so that the new residual is c - v.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import philox
from gradcomp.kernels.segments import (
    BF16,
    BFLOAT16,
    DTYPES,
    FLOAT32,
    FLOAT64,
    FP16,
    FP32,
    FP64,
    L2,
    LINF,
    MINMAX,
    OWNER_RANK,
    QUANTISERS,
    SEGMENT,
    Bytes,
    SegmentTable,
    check_array,
    check_elements,
    check_table,
    wire_bytes_table,
)

Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]


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
    """Encode c = scale * gradient + decay * residual into the payload, and write shadow = c - decoded value.

    A segment with a non-finite c, or whose scale record would not be finite, gets its flag set and a payload
    of zero bytes; its shadow is unspecified then.

    Args:
        codec: one of the codec numbers of `segments`.
        table: SEGMENT rows; reads gradient, residual; writes shadow.
        payload: uint8, written at each row's offset.
        flags: uint8, one per row; only ORed into.
        stochastic: round stochastically instead of to nearest even (quantising codecs only).
        seed: 64 bits, the key of the random stream (see `philox.uniform`).
        step: 32 bits, a word of the random counter.
        rank: 32 bits, a word of the random counter.
        scale: factor of the gradient.
        decay: factor of the residual.

    Raises:
        TypeError: an array of the wrong dtype, or not contiguous.
        ValueError: a malformed row, or one that does not lie inside the payload.
    """
    _check_call(codec, table, flags, (payload,), writable=True)
    sizes = wire_bytes_table(codec, table)
    for i, segment in enumerate(table):
        number = _number_type(codec)
        with np.errstate(all="ignore"):
            contribution = number(scale) * _gradient(segment, number)
            if segment["residual"]:
                contribution = contribution + number(decay) * _residual(segment).astype(number)
        draws = _draws(segment, codec, stochastic, seed, step, rank)
        target = payload[segment["payload"] : segment["payload"] + sizes[i]]
        flags[i] |= _encode_segment(codec, segment, contribution, draws, target)


def decode(
    codec: int, table: SegmentTable, payload: Bytes, flags: Bytes, *, divisor: float, scale: float
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

    Raises:
        TypeError, ValueError: as in `encode`.
    """
    rows = table["output"] != 0
    _check_call(codec, table, flags, (payload,), checked=rows, writable=False)
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
        output[:] = finish(_decode_segment(codec, segment, source), dtype)
        extremes = _extreme_values(codec, segment, source) if codec in QUANTISERS else None
        judged = output if extremes is None else finish(extremes, dtype)
        flags[i] |= not _all_finite(judged)


def decode_add(codec: int, table: SegmentTable, payload: Bytes, *, scale: float) -> None:
    """Add value * scale to the float32 output. Rows without an output are skipped, unchecked.

    Args:
        codec: as in `encode`.
        table: SEGMENT rows; reads and writes output.
        payload: uint8, read at each row's offset.
        scale: factor of the value.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError for an output that is not float32.
    """
    rows = table[table["output"] != 0]
    _check_call(codec, rows, None, (payload,), writable=False)
    if (rows["dtype"] != FLOAT32).any():
        raise ValueError("decode_add adds to float32 outputs only")
    for segment, size in zip(rows, wire_bytes_table(codec, rows), strict=True):
        output = _view(segment["output"], segment["length"], DTYPES[FLOAT32])
        source = payload[segment["payload"] : segment["payload"] + size]
        with np.errstate(all="ignore"):
            output += _decode_segment(codec, segment, source) * np.float32(scale)


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
    """Encode the mean of several payloads: c = (value_0 + value_1 + ...) / divisor + decay * residual.

    The chunk's owner does this; its random stream has rank 2**32 - 1, the same on every rank. Shadow and
    flags are as in `encode`; gradient and output are not used.

    Args:
        codec: as in `encode`.
        table: SEGMENT rows; reads residual; writes shadow.
        payloads: at least one, all of the table's layout; added in this order.
        out: uint8, written at the same offsets; must not overlap a payload.
        flags: uint8, one per row; only ORed into.
        stochastic: as in `encode`.
        seed: as in `encode`.
        step: as in `encode`.
        divisor: number of ranks.
        decay: factor of the residual.

    Raises:
        TypeError, ValueError: as in `encode`; ValueError without a payload, or when out overlaps one.
    """
    _check_call(codec, table, flags, (out,), writable=True)
    _check_call(codec, table, flags, payloads, writable=False)
    if not payloads:
        raise ValueError("reduce needs at least one payload")
    if any(np.may_share_memory(out, payload) for payload in payloads):
        raise ValueError("out overlaps a payload")
    sizes = wire_bytes_table(codec, table)
    number = _number_type(codec)
    for i, segment in enumerate(table):
        place = slice(segment["payload"], segment["payload"] + sizes[i])
        with np.errstate(all="ignore"):
            total = _decode_segment(codec, segment, payloads[0][place])
            for payload in payloads[1:]:
                total = total + _decode_segment(codec, segment, payload[place])
            contribution = total / number(divisor)
            if segment["residual"]:
                contribution = contribution + number(decay) * _residual(segment).astype(number)
        draws = _draws(segment, codec, stochastic, seed, step, OWNER_RANK)
        flags[i] |= _encode_segment(codec, segment, contribution, draws, out[place])


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
    codec: int, segment: np.void, contribution: npt.NDArray[Any], draws: Floats | None, target: Bytes
) -> bool:
    """Write a segment's payload and shadow; return whether it is non-finite."""
    with np.errstate(all="ignore"):
        if codec in QUANTISERS:
            encoded = _encode_quantised(codec, segment, contribution, draws)
        elif codec == FP16:
            encoded = _encode_fp16(segment, contribution)
        else:
            encoded = _encode_cast(codec, contribution)
        if encoded is None or not _all_finite(contribution):
            target[:] = 0
            return True
        target[:], value = encoded
        if segment["shadow"]:
            shadow = _view(segment["shadow"], segment["length"], DTYPES[FLOAT32])
            shadow[:] = contribution - value
    return False


def _decode_segment(codec: int, segment: np.void, source: Bytes) -> npt.NDArray[Any]:
    """Values of a segment: float32, or float64 for FP64."""
    with np.errstate(all="ignore"):
        if codec in QUANTISERS:
            scales, codes = _split_quantised(codec, segment, source)
            lengths = _bucket_lengths(segment)
            dequantise = _QUANTISERS[codec][1]
            per_element = [np.repeat(column, lengths) for column in scales]
            return dequantise(codes, per_element, int(segment["bits"]))
        if codec == FP16:
            factors, halves = _split_fp16(segment, source)
            return halves.astype(np.float32) * np.repeat(factors, _bucket_lengths(segment))
        return source.view(_CAST[codec]).astype(_number_type(codec))


def _extreme_values(codec: int, segment: np.void, source: Bytes) -> Floats:
    """Per bucket, values that are all finite only if every code of the bucket decodes to something finite.

    A bucket's value is monotone in its code, so the ends of the range bound everything between them.
    """
    scales, _ = _split_quantised(codec, segment, source)
    bits = int(segment["bits"])
    with np.errstate(all="ignore"):
        if codec == MINMAX:
            lo, unit = scales
            return np.concatenate((lo, lo + np.float32((1 << bits) - 1) * unit))
        (norm,) = scales
        return np.float32(_magnitudes(bits)) * (norm / np.float32(_magnitudes(bits)))


def _encode_quantised(
    codec: int, segment: np.void, contribution: Floats, draws: Floats | None
) -> tuple[Bytes, Floats] | None:
    """Payload and decoded values of a segment, or None if a bucket's scale record is not finite."""
    bits = int(segment["bits"])
    quantise, dequantise = _QUANTISERS[codec]
    scales: list[Floats] = []
    codes: list[Codes] = []
    values: list[Floats] = []
    for bucket in _equal_buckets(segment):
        c = contribution[bucket].reshape(-1, _bucket_size(segment, bucket))
        u = None if draws is None else draws[bucket].reshape(c.shape)
        record, code = quantise(c, u, bits)
        scales.append(np.stack(record, axis=-1).reshape(-1))
        codes.append(code.reshape(-1))
        values.append(dequantise(code, [column[:, None] for column in record], bits).reshape(-1))
    if not scales:
        return np.empty(0, np.uint8), np.empty(0, np.float32)
    all_scales = np.concatenate(scales)
    if not _all_finite(all_scales):
        return None
    payload = np.concatenate((all_scales.view(np.uint8), pack_bits(np.concatenate(codes), bits)))
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


def _encode_cast(codec: int, contribution: npt.NDArray[Any]) -> tuple[Bytes, npt.NDArray[Any]] | None:
    cast = contribution.astype(_CAST[codec])
    if not _all_finite(cast):
        return None
    return cast.view(np.uint8), cast.astype(contribution.dtype)


# --- quantisers: (buckets, elements) of c and u -> scale columns and codes, and back ------------------------


def _quantise_minmax(c: Floats, u: Floats | None, bits: int) -> tuple[tuple[Floats, ...], Codes]:
    levels = np.float32((1 << bits) - 1)
    lo = c.min(axis=1) + np.float32(0)  # -0 becomes +0, whichever of the two the minimum picked
    hi = c.max(axis=1) + np.float32(0)
    span = hi - lo
    unit, inverse = span / levels, levels / span
    flat = ~np.isfinite(inverse)
    unit[flat], inverse[flat] = 0, 0
    code = _round((c - lo[:, None]) * inverse[:, None], u, levels)
    return (lo, unit), code


def _dequantise_minmax(code: Codes, scales: Sequence[Floats], bits: int) -> Floats:  # noqa: ARG001
    lo, unit = scales
    value: Floats = lo + code.astype(np.float32) * unit
    return value


def _quantise_l2(c: Floats, u: Floats | None, bits: int) -> tuple[tuple[Floats, ...], Codes]:
    return _quantise_by_norm(c, l2_norm(c), u, bits)


def _quantise_linf(c: Floats, u: Floats | None, bits: int) -> tuple[tuple[Floats, ...], Codes]:
    return _quantise_by_norm(c, np.abs(c).max(axis=1), u, bits)


def _quantise_by_norm(
    c: Floats, norm: Floats, u: Floats | None, bits: int
) -> tuple[tuple[Floats, ...], Codes]:
    s = np.float32(_magnitudes(bits))
    inverse = s / norm
    vanishing = ~np.isfinite(inverse) & ~np.isnan(norm)
    norm, inverse = norm.copy(), inverse.copy()
    norm[vanishing], inverse[vanishing] = 0, 0
    if bits == 1:
        return (norm,), _sign_codes(c, inverse, u)
    magnitude = _round(np.abs(c) * inverse[:, None], u, s)
    negative = (c < 0) & (magnitude != 0)
    return (norm,), magnitude | (negative.astype(np.uint8) << np.uint8(bits - 1))


def _sign_codes(c: Floats, inverse: Floats, u: Floats | None) -> Codes:
    if u is None:
        return (c < 0).astype(np.uint8)
    positive_probability = (c * inverse[:, None] + np.float32(1)) * np.float32(0.5)
    return (~(u < positive_probability)).astype(np.uint8)


def _dequantise_by_norm(code: Codes, scales: Sequence[Floats], bits: int) -> Floats:
    (norm,) = scales
    s = _magnitudes(bits)
    magnitude = (code & np.uint8(s)).astype(np.float32) if bits > 1 else np.float32(1)
    value: Floats = magnitude * (norm / np.float32(s))
    return np.where(code >> np.uint8(bits - 1), -value, value)


_QUANTISERS: dict[
    int,
    tuple[
        Callable[[Floats, Floats | None, int], tuple[tuple[Floats, ...], Codes]],
        Callable[[Codes, Sequence[Floats], int], Floats],
    ],
] = {
    MINMAX: (_quantise_minmax, _dequantise_minmax),
    L2: (_quantise_l2, _dequantise_by_norm),
    LINF: (_quantise_linf, _dequantise_by_norm),
}


def _magnitudes(bits: int) -> int:
    """s, the largest magnitude of a signed code; a pure sign counts in units of the norm itself."""
    return max((1 << (bits - 1)) - 1, 1)


def _round(t: Floats, u: Floats | None, limit: np.float32) -> Codes:
    """Codes of the non-negative t: to nearest even, or to floor(t + u)."""
    rounded = np.rint(t) if u is None else np.floor(t + u)
    return np.clip(rounded, 0, limit).astype(np.uint8)


def l2_norm(c: Floats) -> Floats:
    """Euclidean norm of each row, summed in float64 over 16 strided lanes and then a fixed tree."""
    rows, elements = c.shape
    squares = np.zeros((rows, -(-elements // 16), 16))
    squares.reshape(rows, -1)[:, :elements] = np.square(c, dtype=np.float64)
    lanes = np.zeros((rows, 16))
    for j in range(squares.shape[1]):
        lanes += squares[:, j]
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return np.sqrt(lanes[:, 0]).astype(np.float32)


def _fp16_factors(largest: Floats) -> tuple[Floats, Floats]:
    """Normal powers of two 2**e and 2**-e with largest * 2**-e in [2**14, 2**15); 1 where it is 0."""
    exponent = (largest.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127
    e = np.maximum(exponent - 14, -126)
    e[largest == 0] = 0
    return np.ldexp(np.float32(1), e), np.ldexp(np.float32(1), -e)


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
    columns = 2 if codec == MINMAX else 1
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
    if not segment["gradient"]:
        return np.zeros(int(segment["length"]), number)
    return _view(segment["gradient"], segment["length"], DTYPES[segment["dtype"]]).astype(number)


def _residual(segment: np.void) -> Floats:
    return _view(segment["residual"], segment["length"], DTYPES[FLOAT32])


def _number_type(codec: int) -> Any:
    return np.float64 if codec == FP64 else np.float32


def _draws(segment: np.void, codec: int, stochastic: bool, seed: int, step: int, rank: int) -> Floats | None:
    if not stochastic or codec not in QUANTISERS:
        return None
    return philox.uniform(
        int(segment["start"]),
        int(segment["length"]),
        seed=seed,
        layer=int(segment["layer"]),
        step=step,
        rank=rank,
    )


def _all_finite(values: npt.NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all())


def _check_call(
    codec: int,
    table: SegmentTable,
    flags: Bytes | None,
    payloads: Sequence[Bytes],
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
