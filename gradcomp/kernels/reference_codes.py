"""One segment in NumPy: contributions to payload and payload to values; part of `reference`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.quantisers import QUANTISER, Level
from gradcomp.kernels.reference_bits import bucket_lengths, choose_bits, group_counts, split_allocated
from gradcomp.kernels.reference_memory import all_finite, next_residual_of
from gradcomp.kernels.segments import (
    ALLOCATED,
    BF16,
    BFLOAT16,
    DTYPES,
    FLOAT32,
    FLOAT64,
    FP16,
    FP32,
    FP64,
    MINMAX,
    QUANTISERS,
    UNIT_BYTES,
    Bytes,
    Floats,
    Magnitudes,
    bytes_of_allocated,
)


def encode_segment(
    codec: int,
    segment: np.void,
    contribution: npt.NDArray[Any],
    draws: Floats | None,
    magnitudes: Magnitudes | None,
    target: Bytes,
) -> bool:
    """Writes a segment's payload and next residual; returns True if the segment is not finite."""
    if not len(contribution):
        return False
    with np.errstate(all="ignore"):
        if codec in ALLOCATED:
            encoded = _encode_allocated(codec, segment, contribution, draws)
        elif codec in QUANTISERS:
            encoded = _encode_quantised(codec, segment, contribution, draws, magnitudes)
        elif codec == FP16:
            encoded = _encode_fp16(segment, contribution)
        else:
            encoded = _encode_cast(codec, contribution, draws)
        if encoded is None or not all_finite(contribution):
            target[:] = 0
            return True
        target[:], value = encoded
        if segment["next_residual"]:
            next_residual_of(segment)[:] = contribution - value
    return False


def decode_segment(
    codec: int, segment: np.void, source: Bytes, magnitudes: Magnitudes | None
) -> npt.NDArray[Any]:
    """Returns the values of a segment: float32, or float64 for FP64."""
    with np.errstate(all="ignore"):
        if codec in ALLOCATED:
            return _decode_allocated(segment, source)
        if codec in QUANTISERS:
            scales, codes = _split_quantised(codec, segment, source)
            lengths = bucket_lengths(segment)
            per_element = [np.repeat(column, lengths) for column in scales]
            level = _received_level(codec, segment, source, magnitudes)
            return QUANTISER[codec].dequantise(codes, per_element, level)
        if codec == FP16:
            lengths = bucket_lengths(segment)
            factors: Floats = np.repeat(source[: 4 * len(lengths)].view("<f4"), lengths)
            return source[4 * len(lengths) :].view("<f2").astype(np.float32) * factors
        return source.view(_CAST[codec]).astype(number_type(codec))


def extremes(codec: int, segment: np.void, source: Bytes, magnitudes: Magnitudes | None) -> Floats:
    """Returns, per bucket, values that are all finite only if every code of the bucket decodes to a finite value."""
    if codec in ALLOCATED:
        return _extremes_of_allocated(segment, source)
    scales, _ = _split_quantised(codec, segment, source)
    with np.errstate(all="ignore"):
        return QUANTISER[codec].extremes(scales, _received_level(codec, segment, source, magnitudes))


def _encode_quantised(
    codec: int, segment: np.void, contribution: Floats, draws: Floats | None, magnitudes: Magnitudes | None
) -> tuple[Bytes, Floats] | None:
    """Returns payload and decoded values of a segment; None if a bucket's scale record is not finite."""
    level = Level.of(segment, magnitudes)
    quantiser = QUANTISER[codec]
    if quantiser.unit is not None:
        level = level._replace(unit=quantiser.unit(np.abs(contribution).max()))
    draws_of = (None, None) if draws is None else _by_bucket(segment, draws)
    parts = []
    for c, u in zip(_by_bucket(segment, contribution), draws_of, strict=False):
        record, code = quantiser.quantise(c, u, level)
        value = quantiser.dequantise(code, [column[:, None] for column in record], level)
        parts.append((np.stack(record, axis=-1), code, value))
    scales, codes, values = _joined(parts)
    if not all_finite(scales):
        return None
    unit = np.array([level.unit] * (codec in UNIT_BYTES), "<f4").view(np.uint8)
    return np.concatenate((unit, quantiser.scales.pack(scales), pack_bits(codes, level.bits))), values


def _encode_allocated(
    codec: int, segment: np.void, contribution: Floats, draws: Floats | None
) -> tuple[Bytes, Floats] | None:
    """Returns the results of `_encode_quantised` for codecs with a separate bit width for each bucket."""
    begins = np.arange(0, len(contribution), int(segment["bucket_size"]))
    # -0 becomes +0: which of the two a minimum returns is undefined.
    lo = np.minimum.reduceat(contribution, begins) + np.float32(0)
    span = np.maximum.reduceat(contribution, begins) + np.float32(0) - lo
    if not all_finite(contribution) or not all_finite(span):
        return None
    bits = choose_bits(codec, span, group_counts(segment), int(segment["level"]))
    records = np.zeros((len(begins), 2), np.float32)
    parts: list[Bytes] = []
    values = np.empty_like(contribution)
    for k, begin in enumerate(begins.tolist()):
        bucket = slice(begin, min(begin + int(segment["bucket_size"]), len(contribution)))
        c = contribution[bucket]
        levels = np.float32((1 << int(bits[k])) - 1)
        unit, inverse = (span[k] / levels, levels / span[k]) if bits[k] else (np.float32(0), np.float32(0))
        records[k] = lo[k], unit
        t = (c - lo[k]) * inverse
        code = np.clip(np.rint(t) if draws is None else np.floor(t + draws[bucket]), 0, levels).astype(
            np.uint8
        )
        values[bucket] = lo[k] + code.astype(np.float32) * unit
        whole = np.zeros(-(-len(c) // 8) * 8, np.uint8)
        whole[: len(c)] = code
        parts.append(pack_bits(whole, int(bits[k])))
    used = np.concatenate((records.view(np.uint8).reshape(-1), bits, *parts))
    size = bytes_of_allocated(segment["length"], segment["level"], segment["bucket_size"])  # in 64 bits
    payload = np.zeros(int(size), np.uint8)
    payload[: len(used)] = used
    return payload, values


def _decode_allocated(segment: np.void, source: Bytes) -> Floats:
    """Returns the values; all NaN if the bits in the payload are impossible."""
    split = split_allocated(segment, source)
    if split is None:
        return np.full(int(segment["length"]), np.nan, np.float32)
    records, bits, begins = split
    lengths = bucket_lengths(segment)
    codes = [
        unpack_bits(source[begin : begin + -(-length // 8) * b], b, length)
        if b
        else np.zeros(length, np.uint8)
        for b, begin, length in zip(bits.tolist(), begins.tolist(), lengths.tolist(), strict=True)
    ]
    scales = [np.repeat(records[:, k], lengths) for k in range(2)]
    code = np.concatenate(codes) if codes else np.zeros(0, np.uint8)
    return QUANTISER[MINMAX].dequantise(code, scales, Level(0))


def _extremes_of_allocated(segment: np.void, source: Bytes) -> Floats:
    split = split_allocated(segment, source)
    if split is None:
        return np.full(1, np.nan, np.float32)
    records, bits, _ = split
    with np.errstate(all="ignore"):
        lo, unit = records[:, 0], records[:, 1]
        largest = np.left_shift(1, bits.astype(np.int32)) - 1
        return np.concatenate((lo, lo + largest.astype(np.float32) * unit))


def _encode_fp16(segment: np.void, contribution: Floats) -> tuple[Bytes, Floats]:
    parts = []
    for c in _by_bucket(segment, contribution):
        factor, inverse = _fp16_factors(np.abs(c).max(axis=1))
        half = (c * inverse[:, None]).astype(np.float16)
        parts.append((factor, half, half.astype(np.float32) * factor[:, None]))
    factors, halves, values = _joined(parts)
    return np.concatenate((factors.view(np.uint8), halves.view(np.uint8))), values


def _fp16_factors(largest: Floats) -> tuple[Floats, Floats]:
    """Returns normal powers of two 2**e and 2**-e with largest * 2**-e in [2**14, 2**15); 1 where it is 0."""
    exponent = (largest.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127
    e = np.maximum(exponent - 14, -126)
    e[largest == 0] = 0
    return np.ldexp(np.float32(1), e), np.ldexp(np.float32(1), -e)


def _encode_cast(
    codec: int, contribution: npt.NDArray[Any], draws: Floats | None
) -> tuple[Bytes, npt.NDArray[Any]] | None:
    cast = contribution.astype(_CAST[codec])
    if not all_finite(cast):
        return None
    if draws is not None:
        cast = _draw_bfloat16(contribution, draws)
    return cast.view(np.uint8), cast.astype(contribution.dtype)


def _draw_bfloat16(contribution: Floats, draws: Floats) -> npt.NDArray[Any]:
    """Rounds towards zero, or away from it if the 16 cut bits and the lane of the draw add up to a carry.

    A value that bfloat16 represents does not change. The largest bfloat16 is the limit.
    """
    lanes = (draws * np.float32(2.0**16)).astype(np.uint32)
    magnitudes = np.minimum(np.abs(contribution), _LARGEST_BFLOAT16).view(np.uint32)
    signs = contribution.view(np.uint32) >> np.uint32(16) & np.uint32(0x8000)
    return (magnitudes + lanes >> np.uint32(16) | signs).astype(np.uint16).view(DTYPES[BFLOAT16])


# --- payloads -----------------------------------------------------------------------------------------------


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Returns the bit stream of codes below 2**bits, padded with zero bits to whole bytes."""
    return np.packbits(
        np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little"), bitorder="little"
    )


def unpack_bits(stream: Bytes, bits: int, length: int) -> Bytes:
    """Returns the first `length` codes of a bit stream."""
    code_bits = np.unpackbits(stream, count=length * bits, bitorder="little").reshape(length, bits)
    return np.packbits(code_bits, axis=1, bitorder="little")[:, 0]


def _split_quantised(codec: int, segment: np.void, source: Bytes) -> tuple[list[Floats], Bytes]:
    quantiser, buckets = QUANTISER[codec], len(bucket_lengths(segment))
    begin = UNIT_BYTES.get(codec, 0) if buckets else 0
    end = begin + quantiser.scales.nbytes * quantiser.columns * buckets
    records = quantiser.scales.unpack(source[begin:end]).reshape(buckets, quantiser.columns)
    codes = unpack_bits(source[end:], int(segment["level"]), int(segment["length"]))
    return [records[:, k] for k in range(quantiser.columns)], codes


def _received_level(codec: int, segment: np.void, source: Bytes, magnitudes: Magnitudes | None) -> Level:
    """Returns the level of a payload, with the unit that the payload contains."""
    level = Level.of(segment, magnitudes)
    nbytes = UNIT_BYTES.get(codec, 0)
    return level._replace(unit=source[:nbytes].view("<f4")[0]) if nbytes and len(source) else level


_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000).view(np.float32)
_CAST: dict[int, np.dtype[Any]] = {FP32: DTYPES[FLOAT32], BF16: DTYPES[BFLOAT16], FP64: DTYPES[FLOAT64]}


def _by_bucket(segment: np.void, x: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Returns the whole buckets, and the shorter last one, as rows of matrices, as far as they exist."""
    size = int(segment["bucket_size"])
    border = len(x) - len(x) % size
    return [part for part in (x[:border].reshape(-1, size), x[border:].reshape(1, -1)) if part.size]


def _joined(parts: Sequence[tuple[npt.NDArray[Any], ...]]) -> Iterator[npt.NDArray[Any]]:
    """Yields each column of the parts as one vector."""
    for column in zip(*parts, strict=True):
        yield np.concatenate([part.reshape(-1) for part in column])


def number_type(codec: int) -> Any:
    """Returns the NumPy type that contributions are computed in."""
    return np.float64 if codec == FP64 else np.float32
