"""All ranks draw equal indices from the shared seed, so that no index is sent."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import draws
from gradcomp.kernels.codec import Sizes

Indices = npt.NDArray[np.uint32]

INDEX_RANK: Final = 0xFFFFFFFE
"""This number stands for the rank in the random counter of these draws; no rank and no chunk owner has it."""


def random_indices(
    lengths: Sizes, counts: Sizes, layers: Indices, seed: int, step: int
) -> tuple[Sizes, Indices]:
    """Draw counts[i] distinct indices below lengths[i] for every row, ascending, one in each of as many strata.

    Stratum j of n elements and k draws is [floor(j n / k), floor((j + 1) n / k)); the draw is a 32-bit word at the
    random counter (j // 4, layer hash, step, 2**32 - 2), as `gradcomp.kernels.reference_draws.draw_indices` says.

    Args:
        lengths: elements n of each row, in 0..2**32 - 1.
        counts: draws k of each row, in 0..n.
        layers: hash of each row's layer.
        seed: 64 bits.
        step: 32 bits.

    Returns:
        Where each row's indices begin, and the indices of all rows.
    """
    offsets = np.cumsum(counts) - counts
    indices = np.empty(int(counts.sum()), dtype=np.uint32)
    layers = np.ascontiguousarray(layers)
    draws.draw_indices(lengths, counts, layers, offsets, indices, seed=seed, step=step, rank=INDEX_RANK)
    return offsets, indices


def random_blocks(
    lengths: Sizes, counts: Sizes, layers: Indices, seed: int, step: int
) -> tuple[Sizes, Indices]:
    """Draw a block of counts[i] consecutive indices below lengths[i] for every row, ascending.

    Its first element is the one that :func:`random_indices` draws for a count of 1. A block that reaches the end of the
    row continues at element 0, so that every element has probability k / n. Arguments and result are those of
    :func:`random_indices`.
    """
    starts = np.zeros(len(counts), dtype=np.int64)
    starts[counts > 0] = random_indices(lengths, np.minimum(counts, 1), layers, seed, step)[1]
    offsets = np.cumsum(counts) - counts
    wrapped = np.maximum(starts + counts - lengths, 0)  # elements at the beginning, first in order
    # Index j of all rows is j - offset among those, and start + j - offset - wrapped after them.
    shifts = np.stack((-offsets, starts - wrapped - offsets), axis=1).reshape(-1)
    pieces = np.stack((wrapped, counts - wrapped), axis=1).reshape(-1)
    indices = np.arange(int(counts.sum())) + np.repeat(shifts, pieces)
    return offsets, indices.astype(np.uint32)
