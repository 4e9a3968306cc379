"""The segment table and the other arguments of kernels, and the sizes of payloads.

A kernel call serves a whole group of segments. A segment is a run of consecutive elements of one layer with
one level; the table has one row per segment and refers to memory by address, so that gradients are read and
means are written in place. The caller that fills in an address keeps its array alive during the call.

The payload of a segment is ``[one scale record per bucket, in order][codes]``, little endian, without padding
between the two; for NVFP4 the unit of all scales, a float32, comes first. Codes of the quantising codecs form one bit
stream: code i occupies the bits [i*bits, (i+1)*bits), bit 0 of a byte being its least significant one; unused bits of
the last byte are zero. Casts store one element per code. `reference_bits` describes the layout of codecs whose buckets
have bits of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

MINMAX: Final = 0
L2: Final = 1
LINF: Final = 2
FP32: Final = 3
FP16: Final = 4
BF16: Final = 5
FP64: Final = 6
SIGN: Final = 7
VOTE: Final = 8
ONEBIT: Final = 9
CODEBOOK_L2: Final = 10
CODEBOOK_LINF: Final = 11
E4M3: Final = 12
E5M2: Final = 13
E2M1: Final = 14
MINMAX_LEAST_BYTES: Final = 15
MINMAX_LEAST_ERROR: Final = 16
NVFP4: Final = 17
MINMAX_SHIFT: Final = 18
CODEBOOK_MINMAX: Final = 19

SIGNED_CODEBOOKS: Final = (CODEBOOK_L2, CODEBOOK_LINF)
CODEBOOKS: Final = (*SIGNED_CODEBOOKS, CODEBOOK_MINMAX)

BLOCK_FLOATS: Final = (E4M3, E5M2, E2M1, NVFP4)

ALLOCATED: Final = (MINMAX_LEAST_BYTES, MINMAX_LEAST_ERROR)
"""The codecs whose buckets have bits of their own: see `reference_bits`."""

LEVELS: Final = {
    **dict.fromkeys((MINMAX, L2, LINF, *ALLOCATED, MINMAX_SHIFT), range(1, 9)),
    **dict.fromkeys((SIGN, VOTE, ONEBIT), range(1, 2)),
    **dict.fromkeys(SIGNED_CODEBOOKS, range(2, 9)),
    CODEBOOK_MINMAX: range(1, 8),
    **dict.fromkeys((E4M3, E5M2), range(8, 9)),
    **dict.fromkeys((E2M1, NVFP4), range(4, 5)),
}
"""The numbers of bits that each quantising codec takes."""

QUANTISERS: Final = tuple(LEVELS)

UNIT_BYTES: Final = {NVFP4: 4}
"""Bytes of the unit in front of a segment's scale records; all scales of the segment are multiples of it."""

STOCHASTIC: Final = (MINMAX, L2, LINF, BF16, VOTE, *CODEBOOKS, *BLOCK_FLOATS, *ALLOCATED, MINMAX_SHIFT)
"""The codecs that use a draw, to round stochastically, to shift or to decide a tie; others ignore it."""

FLOAT32: Final = 0
FLOAT16: Final = 1
BFLOAT16: Final = 2
FLOAT64: Final = 3

DTYPES: Final[tuple[np.dtype[Any], ...]] = (
    np.dtype("<f4"),
    np.dtype("<f2"),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype("<f8"),
)
"""NumPy dtype of each dtype number of the table."""

_ITEM_BYTES: Final = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.uint64)

DTYPE_NUMBERS: Final = {dtype.name: number for number, dtype in enumerate(DTYPES)}
"""The number of each dtype in the table, by its name."""

MAX_ELEMENTS: Final = 1 << 35
"""The most elements of a layer: the random counter holds element // 8 in 32 bits."""

OWNER_RANK: Final = 0xFFFFFFFF
"""The rank in the random counter when a chunk's owner encodes the mean."""

SEGMENT: Final = np.dtype(
    [
        ("gradient", "<u8"),  # address of the first gradient element; 0: absent, the gradient is zero
        ("residual", "<u8"),  # address of the float32 residual to read; 0: none
        ("next_residual", "<u8"),  # address of the float32 residual to write; 0: none
        ("output", "<u8"),  # address of the first output element; 0: do not write
        ("payload", "<i8"),  # byte offset of the segment's payload in the buffer of the call
        ("start", "<i8"),  # number of the segment's first element within its layer
        ("length", "<i8"),  # elements
        ("layer", "<u4"),  # layer hash, a word of the random counter
        ("level", "<i4"),  # bits of a quantising codec's codes, see LEVELS; else defined by the compressor
        ("bucket_size", "<i4"),  # elements per scale record; FP32, BF16 and FP64 ignore it
        ("dtype", "<i4"),  # of gradient and output, an index into DTYPES
    ]
)

SegmentTable: TypeAlias = npt.NDArray[np.void]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Indices: TypeAlias = npt.NDArray[np.uint32]
Sizes: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

MAGNITUDES_SHAPE: Final = (9, 128)

Magnitudes: TypeAlias = npt.NDArray[np.float32]
"""The magnitudes of codebooks: row b holds the 2**(b-1) ones for b bits in ascending order, from 0 to 1.

For CODEBOOK_MINMAX row b holds the 2**b levels for b bits, in ascending order within 0..1.
"""


@dataclass(frozen=True)
class Draw:
    """Coordinates of the random numbers of one step; counter-based, so nothing random is saved or sent.

    ``seed``: 64 bits, the key of the random stream (see :func:`gradcomp.kernels.philox.uniform`). ``step``, ``rank``:
    32 bits, words of the random counter.
    """

    seed: int
    step: int
    rank: int


class Shapes(NamedTuple):
    """Layers as matrices: n, m and r of each, as int64."""

    rows: Sizes
    columns: Sizes
    ranks: Sizes


class Factor(NamedTuple):
    """P, n x r, or Q, m x r, of every layer, *column by column*: each column is contiguous.

    ``values``: float32, flat. ``at``: int64, the element of ``values`` at which each layer's factor begins.
    """

    values: Floats
    at: Sizes


def wire_bytes(codec: int, length: int, bits: int, bucket_size: int) -> int:
    """Returns the bytes of a segment's payload."""
    if codec not in _WIRE_FORMAT:
        raise ValueError(f"unknown codec {codec}")
    if not 0 <= length <= MAX_ELEMENTS:
        raise ValueError(f"length {length} is not in 0..{MAX_ELEMENTS}")
    if codec in LEVELS and bits not in LEVELS[codec]:
        raise ValueError(f"bits {bits} is not in {_words(LEVELS[codec])}")
    if bucket_size < 1:
        raise ValueError(f"bucket_size {bucket_size} is not positive")
    return int(_payload_bytes(codec, length, bits, bucket_size))


def wire_bytes_table(codec: int, table: SegmentTable) -> Sizes:
    """Returns the bytes of each segment's payload, for a table whose rows :func:`check_table` would accept."""
    if codec not in _WIRE_FORMAT:
        raise ValueError(f"unknown codec {codec}")
    sizes: Sizes = _payload_bytes(
        codec, *(table[name].astype(np.int64) for name in ("length", "level", "bucket_size"))
    )
    return sizes


def _payload_bytes(codec: int, length: Any, bits: Any, bucket_size: Any) -> Any:
    if codec in ALLOCATED:
        return bytes_of_allocated(length, bits, bucket_size)
    scale_bytes, code_bits = _WIRE_FORMAT[codec]
    unit = UNIT_BYTES.get(codec, 0) * (length > 0)
    return unit + scale_bytes * -(-length // bucket_size) + -(-length * (code_bits or bits) // 8)


# codec: (bytes of a bucket's scale record, bits of a code or 0 for the segment's level)
_WIRE_FORMAT: Final = {
    **dict.fromkeys((MINMAX, MINMAX_SHIFT, ONEBIT, CODEBOOK_MINMAX), (8, 0)),
    **dict.fromkeys((L2, LINF, SIGN, VOTE, *SIGNED_CODEBOOKS), (4, 0)),
    **dict.fromkeys(BLOCK_FLOATS, (1, 0)),
    **dict.fromkeys(ALLOCATED, (9, 0)),
    FP32: (0, 32),
    FP16: (4, 16),
    BF16: (0, 16),
    FP64: (0, 64),
}

RECORD_OF_ALLOCATED: Final = 9
"""Bytes of the scale record and the number of bits of a bucket with bits of its own."""


def bytes_of_allocated(length: Any, bits: Any, bucket_size: Any) -> Any:
    """Returns the payload bytes of a segment whose buckets take ``bits`` on average, in whole groups of eight codes."""
    whole, rest = length // bucket_size, length % bucket_size
    groups = whole * groups_of(bucket_size) + groups_of(rest)
    return RECORD_OF_ALLOCATED * (whole + (rest > 0)) + groups * bits


def groups_of(values: Any) -> Any:
    """Returns the number of groups of eight, the last of which may be incomplete."""
    return (values + 7) // 8


def is_table(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and argument.dtype == SEGMENT


def byte_offsets(table: SegmentTable) -> npt.NDArray[np.uint64]:
    """Returns the byte offset of each row's first element in an array that begins with element 0 of its layer."""
    offsets: npt.NDArray[np.uint64] = table["start"].astype(np.uint64) * _ITEM_BYTES[table["dtype"]]
    return offsets


def check_table(codec: int, table: SegmentTable, *payload_sizes: int) -> None:
    """Raises ValueError for the first row that is malformed or does not lie inside every payload buffer."""
    if codec not in _WIRE_FORMAT:
        raise ValueError(f"unknown codec {codec}")
    check_elements(table)
    require_rows(table, table["bucket_size"] >= 1, "bucket_size is not positive")
    require_rows(
        table,
        (table["dtype"] == FLOAT64) == (codec == FP64),
        "dtype float64 goes with codec FP64, and FP64 with nothing else",
    )
    if codec in LEVELS:
        levels = LEVELS[codec]
        require_rows(
            table,
            (table["level"] >= levels.start) & (table["level"] < levels.stop),
            f"bits is not in {_words(levels)}",
        )
    size = wire_bytes_table(codec, table)
    for payload_size in payload_sizes:
        # Written as a difference: the sum of a hostile offset and a size could wrap.
        require_rows(
            table,
            (table["payload"] >= 0) & (table["payload"] <= payload_size - size),
            f"the segment does not lie inside the payload of {payload_size} bytes",
        )


def check_elements(table: SegmentTable) -> None:
    """Raises ValueError for the first row whose dtype or element numbers are out of range."""
    require_rows(table, (table["dtype"] >= 0) & (table["dtype"] < len(DTYPES)), "unknown dtype")
    require_rows(
        table,
        (table["length"] >= 0)
        & (table["length"] <= MAX_ELEMENTS)
        & (table["start"] >= 0)
        & (table["start"] <= MAX_ELEMENTS - table["length"]),
        f"elements start..start+length are not in 0..{MAX_ELEMENTS}",
    )


def check_magnitudes(codec: int, table: SegmentTable, magnitudes: Magnitudes | None) -> None:
    """Raises unless a codebook has magnitudes, ascending for every number of bits in the table, and no other codec has.

    Raises:
        TypeError: not a contiguous float32 array.
        ValueError: missing or not wanted, of another shape, not ascending from 0 to 1, or, as levels, within that.
    """
    if (magnitudes is not None) != (codec in CODEBOOKS):
        raise ValueError("magnitudes go with the codebook codecs, and with nothing else")
    if magnitudes is None:
        return
    if not (
        isinstance(magnitudes, np.ndarray)
        and magnitudes.dtype == np.float32
        and magnitudes.ndim == 2
        and magnitudes.flags.c_contiguous
    ):
        raise TypeError("magnitudes must be a contiguous two-dimensional NumPy array of float32")
    if magnitudes.shape != MAGNITUDES_SHAPE:
        raise ValueError(f"magnitudes have the shape {magnitudes.shape}, not {MAGNITUDES_SHAPE}")
    for bits in np.unique(table["level"]):
        signed = codec in SIGNED_CODEBOOKS
        row = magnitudes[bits, : 1 << (bits - signed)]
        inside = row[0] == 0 and row[-1] == 1 if signed else row[0] >= 0 and row[-1] <= 1
        if not (inside and (row[:-1] <= row[1:]).all()):
            raise ValueError(
                f"magnitudes for {bits} bits do not ascend {'from 0 to 1' if signed else 'within 0..1'}"
            )


def _words(levels: range) -> str:
    return f"{levels.start}..{levels.stop - 1}"


def require_rows(table: SegmentTable, condition: npt.NDArray[np.bool_], complaint: str) -> None:
    """Raises ValueError for the first row that does not fulfil a condition."""
    if not condition.all():
        raise ValueError(f"{complaint}: {table[int(np.argmin(condition))]}")


def check_array(
    name: str, array: Any, dtype: Any, length: int | None = None, *, writable: bool = False
) -> None:
    """Raises TypeError for anything but a contiguous vector of `dtype`, ValueError for another length."""
    if not (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.ndim == 1
        and array.flags.c_contiguous
        and (array.flags.writeable or not writable)
    ):
        kind = "writable, contiguous" if writable else "contiguous"
        raise TypeError(f"{name} must be a {kind} one-dimensional NumPy array of {np.dtype(dtype)}")
    if length is not None and len(array) != length:
        raise ValueError(f"{name} has {len(array)} items for {length} segments")
