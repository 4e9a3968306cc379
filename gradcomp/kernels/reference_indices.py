"""The kernels of sparse contributions in NumPy, which define what every other backend computes.

Codings say how the positions of the selected elements of a row are encoded, and in how many bytes.
A row has k (its count) ascending, distinct uint32 indices below n (its length). Every coding's size is a function
of n and k alone, so that it is never sent:

- ALL, k == n: nothing.
- RAW: each index in 4 bytes, little endian.
- BITMAP: n bits, bit i set where i is an index.
- PACKED, Elias-Fano: with l = max(0, floor(log2(n / k))), first the low l bits of each index, then a vector of
  k + ((n - 1) >> l) + 1 bits in which bit (index_j >> l) + j is set for each j: the numbers of indices whose upper
  part is 0, 1, ..., in unary. At most 2 + log2(n / k) bits per index.

Bit streams begin at a whole byte, bit 0 of a byte being its least significant one, and unused bits of their last
byte are zero; the two parts of PACKED are two streams. A row without indices takes no bytes in any coding.

Source of PACKED: Elias, "Efficient storage and retrieval by content and address of static files", JACM 1974; Fano,
"On the number of bits required to implement an associative memory", 1971.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.reference_memory import memory_at
from gradcomp.kernels.segments import (
    DTYPES,
    FLOAT64,
    SEGMENT,
    Bytes,
    Indices,
    SegmentTable,
    Sizes,
    check_array,
    check_elements,
)

RAW: Final = 0
PACKED: Final = 1
BITMAP: Final = 2
ALL: Final = 3

MAX_INDEXED: Final = 1 << 32
"""The most elements that 32-bit indices can address."""

Codings: TypeAlias = npt.NDArray[np.int32]

# Of codings with equal sizes the one that is cheapest to decode comes first.
_PREFERENCE: Final = (ALL, RAW, BITMAP, PACKED)


def index_bytes(coding: int | Codings, lengths: Sizes, counts: Sizes) -> Sizes:
    """Returns the bytes of each row's coded indices.

    Args:
        coding: one for each row, or one for all.
        lengths: elements of each row, n in 0..2**32.
        counts: indices of each row, k in 0..n.

    Raises:
        ValueError: an unknown coding, a number out of range, or ALL for a row with 0 < k < n.
    """
    codings = np.broadcast_to(coding, np.shape(lengths))
    check_rows(codings, lengths, counts)
    return np.choose(codings, [_SIZE[known](lengths, counts) for known in range(len(_SIZE))])


def smallest_coding(lengths: Sizes, counts: Sizes) -> Codings:
    """Returns the coding of each row that takes the fewest bytes; of equal ones the first of ALL, RAW, BITMAP, PACKED.

    Args:
        lengths: elements of each row, n in 0..2**32.
        counts: indices of each row, k in 0..n.

    Raises:
        ValueError: a number out of range.
    """
    check_rows(np.full(np.shape(lengths), RAW), lengths, counts)
    sizes = np.stack([_SIZE[coding](lengths, counts) for coding in _PREFERENCE])
    # Larger than any size.
    sizes[_PREFERENCE.index(ALL), (counts != 0) & (counts != lengths)] = MAX_INDEXED * 4
    smallest: Codings = np.array(_PREFERENCE, np.int32)[np.argmin(sizes, axis=0)]
    return smallest


def low_bits(lengths: Any, counts: Any) -> Any:
    """Returns the number of low bits that PACKED stores of each index: max(0, floor(log2(n / k)))."""
    quotient = np.asarray(lengths) // np.maximum(counts, 1)
    return np.maximum(np.frexp(quotient.astype(np.float64))[1].astype(np.int64) - 1, 0)


def upper_bits(lengths: Any, counts: Any) -> Any:
    """Returns the bits of the unary part of PACKED, for rows with indices."""
    return counts + ((lengths - 1) >> low_bits(lengths, counts)) + 1


def _packed_bytes(lengths: Sizes, counts: Sizes) -> Any:
    lower = _whole_bytes(counts * low_bits(lengths, counts))
    return np.where(counts == 0, 0, lower + _whole_bytes(upper_bits(lengths, counts)))


def _whole_bytes(bits: Sizes) -> Sizes:
    return (bits + 7) // 8


_SIZE: Final[dict[int, Any]] = {
    RAW: lambda lengths, counts: 4 * counts,
    PACKED: _packed_bytes,
    BITMAP: lambda lengths, counts: np.where(counts == 0, 0, _whole_bytes(lengths)),
    ALL: lambda lengths, counts: np.zeros_like(counts),
}


def check_rows(codings: npt.NDArray[Any], lengths: Sizes, counts: Sizes) -> None:
    """Raises ValueError for the first row whose coding, length or count is out of range."""
    require((codings >= 0) & (codings < len(_SIZE)), "unknown coding")
    require((lengths >= 0) & (lengths <= MAX_INDEXED), f"length is not in 0..{MAX_INDEXED}")
    require((counts >= 0) & (counts <= lengths), "count is not in 0..length")
    require((codings != ALL) | (counts == lengths) | (counts == 0), "coding ALL leaves out elements")


def require(condition: npt.NDArray[np.bool_], complaint: str) -> None:
    """Raises ValueError for the first row where the condition does not hold."""
    if not condition.all():
        raise ValueError(f"row {int(np.argmin(condition))}: {complaint}")


# --- coding -------------------------------------------------------------------------------------------------


def encode_indices(
    codings: Codings,
    lengths: Sizes,
    counts: Sizes,
    offsets: Sizes,
    indices: Indices,
    places: Sizes,
    payload: Bytes,
) -> None:
    """Writes the indices of every row into the payload, in the row's coding.

    Args:
        codings: int32, one per row; see `reference_indices`.
        lengths: int64, elements of each row, 0..2**32.
        counts: int64, indices of each row.
        offsets: int64, where in `indices` each row's begin.
        indices: uint32; those of a row are ascending, distinct and below its length.
        places: int64, byte offset of each row in the payload.
        payload: uint8; `index_bytes` of them are written per row. May not overlap `indices`.

    Raises:
        TypeError: an array of the wrong dtype, or not contiguous.
        ValueError: a row, named, that is malformed or does not lie inside an array, or whose indices are out of
            range or not ascending. The contents of `payload` are unspecified then.
    """
    sizes = check_coding(codings, lengths, counts, offsets, indices, places, payload, encoding=True)
    for i in range(len(codings)):
        own = indices[offsets[i] : offsets[i] + counts[i]]
        require_ascending(i, own, int(lengths[i]))
        if counts[i]:
            stream = _encode_row(int(codings[i]), int(lengths[i]), own.astype(np.int64))
            payload[places[i] : places[i] + sizes[i]] = stream


def decode_indices(
    codings: Codings,
    lengths: Sizes,
    counts: Sizes,
    offsets: Sizes,
    indices: Indices,
    places: Sizes,
    payload: Bytes,
) -> None:
    """Reads the indices of every row from the payload, which may hold anything.

    Args:
        codings: as in `encode_indices`.
        lengths: as in `encode_indices`.
        counts: as in `encode_indices`.
        offsets: as in `encode_indices`.
        indices: uint32, written.
        places: as in `encode_indices`.
        payload: uint8, read.

    Raises:
        TypeError: as in `encode_indices`.
        ValueError: as in `encode_indices`; also a row, named, whose bytes `encode_indices` does not write: another
            number of indices than its count, or padding bits that are set. The contents of `indices` are
            unspecified then.
    """
    sizes = check_coding(codings, lengths, counts, offsets, indices, places, payload, encoding=False)
    for i in range(len(codings)):
        if counts[i]:
            stream = payload[places[i] : places[i] + sizes[i]]
            decoded = _decode_row(i, int(codings[i]), int(lengths[i]), int(counts[i]), stream)
            require_ascending(i, decoded, int(lengths[i]))
            indices[offsets[i] : offsets[i] + counts[i]] = decoded


def _encode_row(coding: int, length: int, indices: Sizes) -> Bytes:
    if coding == ALL:
        return np.empty(0, np.uint8)
    if coding == RAW:
        return indices.astype("<u4").view(np.uint8)
    if coding == BITMAP:
        return _set_bits(indices, length)
    l = int(low_bits(length, len(indices)))  # noqa: E741
    lower = (indices[:, None] >> np.arange(l) & 1).astype(np.uint8)
    upper = _set_bits((indices >> l) + np.arange(len(indices)), int(upper_bits(length, len(indices))))
    return np.concatenate((np.packbits(lower, bitorder="little"), upper))


def _decode_row(row: int, coding: int, length: int, count: int, stream: Bytes) -> Sizes:
    if coding == ALL:
        return np.arange(count)
    if coding == RAW:
        return stream.view("<u4").astype(np.int64)
    if coding == BITMAP:
        return _positions(row, stream, length, count)
    l = int(low_bits(length, count))  # noqa: E741
    border = (count * l + 7) // 8
    lower = _bits(row, stream[:border], count * l).reshape(count, l).astype(np.int64)
    positions = _positions(row, stream[border:], int(upper_bits(length, count)), count)
    decoded: Sizes = (positions - np.arange(count) << l) + (lower << np.arange(l)).sum(axis=1)
    return decoded


def _set_bits(positions: Sizes, size: int) -> Bytes:
    bits = np.zeros(size, np.uint8)
    bits[positions] = 1
    return np.packbits(bits, bitorder="little")


def _bits(row: int, stream: Bytes, size: int) -> Bytes:
    bits = np.unpackbits(stream, bitorder="little")
    if bits[size:].any():
        raise ValueError(f"row {row}: padding bits are set")
    return bits[:size]


def _positions(row: int, stream: Bytes, size: int, count: int) -> Sizes:
    positions = np.flatnonzero(_bits(row, stream, size))
    if len(positions) != count:
        raise ValueError(f"row {row}: {len(positions)} bits are set for {count} indices")
    return positions


# --- scattering ---------------------------------------------------------------------------------------------


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
    """Writes output = ((0 + v_0 + v_1 + ...) / divisor) * scale, rounded to the segment's dtype.

    v_r is rank r's value for an element, if it has one; values are added in rank order, in float32. An element that no
    rank has is +0. A segment whose flag is set on entry is filled with NaN, and its lists are not read. A segment with
    an output that is not finite gets its flag set. Rows without an output are skipped, unchecked.

    Args:
        table: SEGMENT rows; reads length and dtype, writes output.
        flags: uint8, one per row; read, and ORed into.
        offsets: int64, shape (ranks, rows): where each list begins in `indices`, and in `values`.
        counts: int64, shape (ranks, rows): items of each list.
        indices: uint32; those of a list are ascending, distinct and below the segment's length.
        values: float32.
        divisor: number of ranks, or 1 for values that are the mean; positive.
        scale: factor of the result; not negative.

    Raises:
        TypeError: an array of the wrong dtype, or not contiguous.
        ValueError: a malformed row, named; a list that does not lie inside `indices` and `values`, or that is out of
            range or not ascending; a divisor or scale for which 0 / divisor * scale is not +0 in float32. Nothing
            was written then.
    """
    _check_scatter(table, flags, offsets, counts, indices, values, divisor, scale)
    for i in np.flatnonzero(table["output"] != 0):
        segment = table[i]
        dtype = DTYPES[segment["dtype"]]
        output = memory_at(int(segment["output"]), int(segment["length"]), dtype)
        if flags[i]:
            output[:] = np.nan
            continue
        total = np.zeros(int(segment["length"]), np.float32)
        with np.errstate(all="ignore"):
            for offset, count in zip(offsets[:, i], counts[:, i], strict=True):
                total[indices[offset : offset + count]] += values[offset : offset + count]
            output[:] = (total / np.float32(divisor) * np.float32(scale)).astype(dtype)
        flags[i] |= not np.isfinite(output).all()


# --- checks -------------------------------------------------------------------------------------------------


def require_ascending(row: int, indices: npt.NDArray[Any], length: int) -> None:
    """Raises ValueError unless indices are ascending, distinct and below the length."""
    if not (indices[1:] > indices[:-1]).all():
        raise ValueError(f"row {row}: indices are not ascending")
    if len(indices) and indices[-1] >= length:
        raise ValueError(f"row {row}: an index is not below the length of {length}")


def check_coding(
    codings: Codings,
    lengths: Sizes,
    counts: Sizes,
    offsets: Sizes,
    indices: Indices,
    places: Sizes,
    payload: Bytes,
    *,
    encoding: bool,
) -> Sizes:
    """Raises TypeError or ValueError for arguments that no kernel accepts; returns the bytes of each row."""
    check_array("codings", codings, np.int32)
    columns = {"lengths": lengths, "counts": counts, "offsets": offsets, "places": places}
    for name, column in columns.items():
        check_array(name, column, np.int64, len(codings))
    check_array("indices", indices, np.uint32, writable=not encoding)
    check_array("payload", payload, np.uint8, writable=encoding)
    check_aligned(codings=codings, indices=indices, **columns)
    if np.may_share_memory(indices, payload):
        raise ValueError("indices overlap the payload")
    check_rows(codings, lengths, counts)
    sizes = index_bytes(codings, lengths, counts)
    # Written as differences: the sum of a hostile offset and a size could wrap.
    require((offsets >= 0) & (offsets <= len(indices) - counts), "the list does not lie inside indices")
    require((places >= 0) & (places <= len(payload) - sizes), "the row does not lie inside the payload")
    return sizes


def _check_scatter(
    table: SegmentTable,
    flags: Bytes,
    offsets: Sizes,
    counts: Sizes,
    indices: Indices,
    values: npt.NDArray[np.float32],
    divisor: float,
    scale: float,
) -> None:
    check_array("indices", indices, np.uint32)
    check_array("values", values, np.float32)
    check_aligned(indices=indices, values=values)
    check_targets(table, flags, offsets, counts, divisor, scale)
    read = np.flatnonzero((table["output"] != 0) & (flags == 0))
    capacity = min(len(indices), len(values))
    for i in read:
        for offset, count in zip(offsets[:, i].tolist(), counts[:, i].tolist(), strict=True):
            if not (0 <= count <= capacity and 0 <= offset <= capacity - count):
                raise ValueError(f"row {i}: a list does not lie inside indices and values")
            require_ascending(int(i), indices[offset : offset + count], int(table["length"][i]))


def check_targets(
    table: SegmentTable, flags: Bytes, offsets: Sizes, counts: Sizes, divisor: float, scale: float
) -> None:
    """Checks all arguments but the lists."""
    check_array("table", table, SEGMENT)
    check_array("flags", flags, np.uint8, len(table), writable=True)
    for name, matrix in (("offsets", offsets), ("counts", counts)):
        if not (isinstance(matrix, np.ndarray) and matrix.ndim == 2 and matrix.flags.c_contiguous):
            raise TypeError(f"{name} must be a contiguous two-dimensional NumPy array of int64")
        check_array(name, matrix.reshape(-1), np.int64)
    check_aligned(offsets=offsets, counts=counts)
    if offsets.shape != counts.shape or offsets.shape[1] != len(table):
        raise ValueError(f"offsets {offsets.shape} and counts {counts.shape} for {len(table)} segments")
    with np.errstate(all="ignore"):
        untouched = np.float32(0) / np.float32(divisor) * np.float32(scale)
    if untouched != 0 or np.signbit(untouched):
        raise ValueError(f"divisor {divisor} is not positive, or scale {scale} negative or not finite")

    written = table["output"] != 0
    check_elements(table[written])
    if (table["dtype"][written] == FLOAT64).any():
        raise ValueError("scatter_mean writes no float64 outputs")


def check_aligned(**arrays: npt.NDArray[Any]) -> None:
    """Raises TypeError for the first array that is not aligned to its items."""
    for name, array in arrays.items():
        if not array.flags.aligned:
            raise TypeError(f"{name} must be aligned to its items")
