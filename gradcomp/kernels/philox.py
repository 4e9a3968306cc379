"""Philox4x32-10, the counter-based generator of stochastic rounding, and the random indices drawn from it.

A draw is a pure function of (seed, step, rank, layer, element), so nothing random is stored or sent, and
neither the layout of layers in exchange buckets nor the backend that computes it can change it.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import Indices, Sizes, check_array

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_LAST_BLOCK = 0xFFFFFFFF

Words: TypeAlias = npt.NDArray[np.uint64]
MAX_DRAWN_FROM: Final = (1 << 32) - 1
"""The most elements of a row: as many as a 32-bit random word and a 32-bit index can address."""


def philox4x32(counter: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Returns random words for each counter.

    Args:
        counter: uint32, shape (..., 4).
        key: two 32-bit words.

    Returns:
        uint32 of the counter's shape.
    """
    # The 32-bit words lie in 64-bit lanes, so that a product keeps its high half.
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & _LOW_WORD,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & _LOW_WORD,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniform(
    start: int, length: int, *, seed: int, layer: int, step: int, rank: int
) -> npt.NDArray[np.float32]:
    """Returns draws in (0, 1) for the elements start..start+length of a layer: u = (lane + offset) / 2**16.

    Element i takes 16-bit lane i % 8, low half first, of the words at counter (i // 8, layer, step, rank);
    :func:`offset` gives the offset of the step.
    """
    first_block, last_block = start // 8, -(-(start + length) // 8)
    counter = np.empty((last_block - first_block, 4), np.uint32)
    counter[:, 0] = np.arange(first_block, last_block, dtype=np.uint64)
    counter[:, 1:] = layer, step, rank
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).astype("<u4")
    lanes = words.view("<u2").reshape(-1)[start % 8 : start % 8 + length]
    return (lanes.astype(np.float32) + np.float32(offset(step))) * np.float32(2.0**-16)


def shift(*, seed: int, layer: int, step: int, rank: int) -> np.float32:
    """Returns the one draw u in (-1/2, 1/2) that moves a layer's lattice in a step (Markov et al. 2024, definition 1).

        u = (2 k + 1) / 2**24 - 1/2,    k = word // 2**9

    The word is the first at counter (2**32 - 1, layer, step, rank), the last that :func:`uniform` could use. u is
    exact in float32. Its 2**23 values are equally likely, and their mean is zero.
    """
    counter = np.array([_LAST_BLOCK, layer, step, rank], np.uint32)
    word = int(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[0])
    return np.float32((2 * (word >> 9) + 1 - 2**23) * 2.0**-24)


def offset(step: int) -> float:
    """Returns the offset of a step's lanes: (k + 1/2) / 128, with k the top 7 bits of step * 0x9E3779B9 mod 2**32.

    Lanes alone would make every probability a multiple of 2**-16, and those below 2**-16 zero. The offsets of
    successive steps, and those of every second or third step, are spread evenly over (0, 1): averaged over many steps,
    a probability is exact to 2**-24. Lane and offset take 24 bits together, so that u is exact in float32.
    """
    return ((step * 0x9E3779B9 & 0xFFFFFFFF) // 2**25 + 0.5) / 128


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
    """Raises TypeError or ValueError for arguments that no backend accepts."""
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
