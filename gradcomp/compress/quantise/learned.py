"""Levels between a minimum and a maximum, learned from values by gradient descent (Markov 2024, Algorithm 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Compressor
from gradcomp.compress.quantise.bucketed import Codebook
from gradcomp.compress.quantise.quantize import Quantize

#: The settings of Markov 2024, appendix C.3: the learning rate, values in a batch, and layers that are too small.
RATE, BATCH, SMALL = 0.01, 1024, 100_000
#: A codebook between minimum and maximum has at most so many bits. Above 6 learning has no effect (section 5.7).
MOST_BITS = 7

Doubles = npt.NDArray[np.float64]


def even(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels of :class:`gradcomp.Quantize`, as float32 numbers."""
    return tuple(np.linspace(0, 1, 1 << bits, dtype=np.float32).tolist())


def with_levels(compressor: Compressor, *, unbiased: bool) -> Codebook | None:
    """Return the compressor with levels that can be learned, at first even ones; None if it cannot have any.

    A random shift moves even levels. Levels that are learned are not moved: values are then rounded stochastically
    if ``unbiased``, else to the nearest level.
    """
    if isinstance(compressor, Codebook):
        return compressor if compressor.scaling == "minmax" else None
    if (
        not isinstance(compressor, Quantize)
        or compressor.scaling != "minmax"
        or compressor.allocate is not None
    ):
        return None
    if not isinstance(compressor.bits, int) or compressor.bits > MOST_BITS:
        return None
    rounding, feedback = compressor.rounding, compressor.feedback
    if rounding == "shift":
        rounding, feedback = "stochastic" if unbiased else "nearest", bool(feedback)
    return Codebook(even(compressor.bits), compressor.bucket_size, "minmax", rounding, feedback)


def normalised(values: npt.NDArray[np.float32], bucket_size: int | None) -> Doubles:
    """Return (v - min) / (max - min) of every quantisation bucket, from which levels are learned.

    Constant buckets are left out, since every level is exact for them.
    """
    size = min(bucket_size or len(values), max(len(values), 1))
    whole = len(values) - len(values) % max(size, 1)
    parts = []
    for c in (values[:whole].reshape(-1, size), values[whole:].reshape(1, -1)):
        if c.size:
            lo = c.min(axis=1, keepdims=True).astype(np.float64)
            span = c.max(axis=1, keepdims=True) - lo
            varies = span[:, 0] > 0
            parts.append(((c[varies] - lo[varies]) / span[varies]).reshape(-1))
    return np.concatenate(parts) if parts else np.zeros(0)


def exact_levels(q: Doubles) -> tuple[float, ...]:
    """Return levels as ascending float32 numbers in [0, 1], with which values are coded."""
    exact = np.clip(q.astype(np.float32), 0, 1)
    exact[exact < np.finfo(np.float32).tiny] = 0
    return tuple(np.maximum.accumulate(exact).tolist())


def learned(
    values: Doubles, levels: Sequence[float], *, pinned: bool, rate: float = RATE, batch: int = BATCH
) -> Doubles:
    """Return the levels q after each value v has moved the level nearest to it: q <- q - rate (q - v).

    Args:
        values: normalised values, in [0, 1].
        levels: ascending, in [0, 1]; they stay ascending, since a level never leaves the cell of values nearest to it.
        pinned: the first and the last level do not move, which unbiased rounding needs.
        rate: the part of the way to a value that its level moves.
        batch: values choose their levels in batches of at most so many, and then move them in order. Of K batches,
            batch k has the values k, k + K, k + 2K, ..., so that each has values of all parts of a layer.

    Source: Markov 2024, Algorithm 5.1 and appendix C.3. With ``batch=1`` it is the algorithm as printed.
    """
    q = np.array(levels, np.float64)
    ends = q[0], q[-1]
    kept = (1 - rate) ** np.arange(batch + 1)
    batches = -(-len(values) // batch)
    for k in range(batches):
        v = values[k::batches]
        chosen = np.searchsorted((q[1:] + q[:-1]) / 2, v).astype(np.uint8)
        count = np.bincount(chosen, minlength=len(q))
        order = np.argsort(chosen, kind="stable")
        level = chosen[order]
        # The j-th last of a level's n values ends up with the weight rate (1 - rate)^j, the level itself (1 - rate)^n.
        after = np.cumsum(count)[level] - 1 - np.arange(len(v))
        q = q * kept[count] + np.bincount(level, rate * kept[after] * v[order], minlength=len(q))
        if pinned:
            q[0], q[-1] = ends
    return np.maximum.accumulate(q)  # against rounding errors where levels coincide
