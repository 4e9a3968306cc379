"""Index codings: how the positions of the selected elements of a row are encoded, and in how many bytes.

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

RAW: Final = 0
PACKED: Final = 1
BITMAP: Final = 2
ALL: Final = 3

MAX_INDEXED: Final = 1 << 32
"""The most elements that 32-bit indices can address."""

Codings: TypeAlias = npt.NDArray[np.int32]
Indices: TypeAlias = npt.NDArray[np.uint32]
Sizes: TypeAlias = npt.NDArray[np.int64]

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
