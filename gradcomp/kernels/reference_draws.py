"""Random indices in NumPy: this file defines what every other body draws."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.philox import philox4x32
from gradcomp.kernels.segments import check_array

Indices: TypeAlias = npt.NDArray[np.uint32]
Sizes: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

MAX_DRAWN_FROM: Final = (1 << 32) - 1
"""The most elements of a row: as many as a 32-bit random word and a 32-bit index can address."""


def draw_indices(
    lengths: Sizes,
    counts: Sizes,
    layers: Indices,
    offsets: Sizes,
    indices: Indices,
    *,
    seed: int,
    step: int,
    rank: int,
) -> None:
    """Draws counts[i] distinct indices below lengths[i] for every row, ascending, one in each of counts[i] strata.

    Stratum j of a row with n elements and k draws is [floor(j n / k), floor((j + 1) n / k)); the index is
    first + floor(u size / 2**32), with u a 32-bit word of Philox4x32-10: key: the seed, low half first; counter:
    j // 4, layer hash, step, rank; word j % 4 of its four. Every index of a stratum of s elements has probability
    1 / s, up to 2**-32.

    Args:
        lengths: int64, elements n of each row, in 0..2**32 - 1.
        counts: int64, draws k of each row, in 0..n.
        layers: uint32, hash of each row's layer.
        offsets: int64, where each row's indices begin.
        indices: uint32, written.
        seed: 64 bits.
        step: 32 bits.
        rank: 32 bits.

    Raises:
        TypeError: an array of the wrong dtype, or not contiguous.
        ValueError: a number out of range, or a row that does not lie inside `indices`. Nothing was written then.
    """
    check_draws(lengths, counts, layers, offsets, indices)
    ends = np.cumsum(counts)
    begins = ends - counts
    blocks = -(-counts // 4)
    block_begins = np.cumsum(blocks) - blocks
    counter = np.empty((int(blocks.sum()), 4), dtype=np.uint32)
    counter[:, 0] = np.arange(len(counter)) - np.repeat(block_begins, blocks)
    counter[:, 1] = np.repeat(layers, blocks)
    counter[:, 2:] = step, rank
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)
    first, sizes = strata(lengths, counts)
    # A row's words begin at a whole counter, its indices at the row's offset.
    places = np.arange(len(first))
    drawn = words[places + np.repeat(4 * block_begins - begins, counts)]
    indices[places + np.repeat(offsets - begins, counts)] = first + (drawn * sizes >> np.uint64(32))


def strata(lengths: Sizes, counts: Sizes) -> tuple[Words, Words]:
    """Returns first element and size of every stratum, row after row."""
    rows = np.repeat(np.arange(len(counts)), counts)
    n, k = lengths.astype(np.uint64)[rows], counts.astype(np.uint64)[rows]
    j = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    first = j * n // k  # j n < 2**64, since j < k <= n < 2**32
    return first, (j + np.uint64(1)) * n // k - first


def check_draws(lengths: Sizes, counts: Sizes, layers: Indices, offsets: Sizes, indices: Indices) -> None:
    """Raises TypeError or ValueError for arguments that no body accepts."""
    for name, column in (("lengths", lengths), ("counts", counts), ("offsets", offsets)):
        check_array(name, column, np.int64, len(lengths))
    check_array("layers", layers, np.uint32, len(lengths))
    check_array("indices", indices, np.uint32, writable=True)
    # Written as a difference: the sum of a hostile offset and a count could wrap.
    for condition, complaint in (
        ((lengths >= 0) & (lengths <= MAX_DRAWN_FROM), f"length is not in 0..{MAX_DRAWN_FROM}"),
        ((counts >= 0) & (counts <= lengths), "count is not in 0..length"),
        ((offsets >= 0) & (offsets <= len(indices) - counts), "the indices do not lie inside the array"),
    ):
        if not condition.all():
            raise ValueError(f"row {int(np.argmin(condition))}: {complaint}")
