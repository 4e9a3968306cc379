"""Implements Adasum: a sum of vectors in which the component that two of them share counts once.

For two vectors a and b (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, section 3):

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

Orthogonal vectors are added and equal ones averaged. N ranks, a power of two, combine along a binary tree: first
neighbouring ranks, then neighbouring pairs, and so on. A vector of zeros changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.job.channel import Channel

Array = npt.NDArray[Any]


def adasum(channel: Channel, flat: Array, lengths: Sequence[int]) -> None:
    """Overwrite ``flat``, of float32 or float64, with the Adasum over ranks of each tensor in it.

    ``lengths`` are the element counts of the tensors that are stored one after another in ``flat``; each is a vector of
    its own. Both ranks of a pair compute the same result from the same operands, so all ranks end with the same bits.
    Runs on the channel's thread. Wire: log2(N) rounds, each of all d bytes.
    """
    received = np.empty_like(flat)
    distance = 1
    while distance < channel.size:
        peer = channel.rank ^ distance
        channel.exchange(flat.view(np.uint8), received.view(np.uint8), peer)
        first, second = (flat, received) if channel.rank < peer else (received, flat)
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            flat[part] = combine(first[part], second[part])
            start += length
        distance *= 2


def combine(a: Array, b: Array) -> Array:
    """Return the Adasum of two vectors; dot product and norms are accumulated in float64."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot, norm_a, norm_b = (float(x @ y) for x, y in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b)))
    return np.asarray(_weight(dot, norm_a) * wide_a + _weight(dot, norm_b) * wide_b).astype(a.dtype)


def _weight(dot: float, norm: float) -> float:
    return 1.0 - dot / (2.0 * norm) if norm > 0.0 else 1.0
