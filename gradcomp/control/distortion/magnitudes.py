"""Measures a layer without its k largest elements, for many k at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gradcomp.compress.sparse.payload import Selection
from gradcomp.control.base import Doubles, Numbers
from gradcomp.control.distortion import Budget, energies, segment
from gradcomp.core.vectors import Floats
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import FLOAT32, SEGMENT

# A magnitude has 31 bits. Two that share those above the last 13 differ by 0.1% at most.
_LOW_BITS = 13
_BINS = 1 << (31 - _LOW_BITS)
_SPLIT = 1 << _LOW_BITS

#: Sorting up to this many elements of a bin takes less time and memory than counting them by their lower bits.
_FEW = _SPLIT // 4

#: Nonzero values are copied if at most one value in this many is nonzero.
_SPARSE = 2

#: Elements counted at a time, and the bytes that each of them takes: a word, an int64 and a float64.
_PIECE = 1 << 18
_PIECE_BYTES = 24


def rest_norms(values: Floats, counts: Numbers, budget: Budget) -> Doubles:
    """Returns sqrt(sum of the squares of the n - k smallest magnitudes) for every k in ``counts``: the error of TopK.

    Sums are float64 and run over the elements that are left, so that nothing cancels. Two ways give the same results:

    - Selecting takes the largest k of all (O(n)), sorts them (O(k log k)) and sums the squares between one k and the
      next. It takes 4 n + 12 k bytes, and is faster if the largest k is at most about n / 4.
    - Counting counts magnitudes and sums their squares by their upper bits. It then sorts the elements of the bin in
      which a selection ends, or, if there are many, counts them by their lower bits, so that elements that share a bin
      are equal. It reads the values twice, O(n), for any k, and takes 28 MB for 100 different k, for any n.

    Zeros add no error: if most values are zero, as in the gradient of an embedding in one step, the others are copied.

    Args:
        values: float32, flat, contiguous, finite.
        counts: int64, each in 0..n.
        budget: if the faster way takes too much, the other one is used. ConfigError if both do.
    """
    some = int(np.count_nonzero(values))
    if some <= len(values) // _SPARSE and budget.allows(4 * some + len(values)):
        values, counts = values[values != 0], np.minimum(counts, some)
        if budget.nbytes is not None:
            budget = Budget(budget.nbytes - 4 * some, budget.what)
    wanted, places = np.unique(counts, return_inverse=True)
    largest = int(wanted.max(initial=0))
    selecting = 4 * len(values) + 12 * largest
    counting = 4 * 8 * _BINS + 2 * 8 * len(wanted) * _SPLIT + _PIECE_BYTES * min(len(values), _PIECE)
    # Measured: 36 ns for a sorted element, 9 ns for a counted one, and 5 ms for the bins.
    selecting_is_faster = 36 * largest <= 9 * len(values) + 5_000_000
    ways = (selecting, counting) if selecting_is_faster else (counting, selecting)
    way = _by_selecting if budget.first_or_least(*ways) == selecting else _by_counting
    norms: Doubles = np.sqrt(way(values, wanted))[places.reshape(-1)]
    return norms


def largest_of(values: Floats, count: int, rest: Floats) -> Selection:
    """Returns the ``count`` elements of largest magnitude, ties by lower index.

    Args:
        values: float32, flat, contiguous, finite.
        count: 0..n.
        rest: float32, n elements; receives the values without the returned ones.
    """
    table = segment(values.ctypes.data, len(values))
    table["next_residual"] = rest.ctypes.data
    chosen, flags = Selection.allocate(np.array([count])), np.zeros(1, np.uint8)
    places = chosen.counts, chosen.offsets, chosen.indices, chosen.values, chosen.counts
    HOST.kernels.select_top(table, flags, np.ones(1, np.float32), *places, decay=1.0, zeros=True)
    HOST.kernels.put(table, chosen.offsets, chosen.counts, chosen.indices, np.zeros_like(chosen.values))
    return chosen


def _by_selecting(values: Floats, counts: Numbers) -> Doubles:
    """Returns the squared norms of the rest for ascending ``counts``."""
    largest = int(counts.max(initial=0))
    rest = np.empty_like(values)
    chosen = largest_of(values, largest, rest).values
    np.abs(chosen, out=chosen)
    chosen.sort()

    # Sums start with the smallest part: the elements that are never selected, then those between a k and the next
    # smaller one.
    borders = largest - counts[::-1]
    parts = np.zeros(len(counts), SEGMENT)
    parts["dtype"] = FLOAT32
    parts["gradient"], parts["length"] = rest.ctypes.data, len(rest)
    parts["gradient"][1:] = chosen.ctypes.data + 4 * borders[:-1]
    parts["length"][1:] = np.diff(borders)
    return np.cumsum(energies(parts))[::-1]


def _by_counting(values: Floats, counts: Numbers) -> Doubles:
    """Returns the squared norms of the rest for ascending ``counts``."""
    found, sums = np.zeros(_BINS, np.int64), np.zeros(_BINS)
    for piece in _pieces(values):
        squares = np.square(piece, dtype=np.float64)
        bins = _magnitudes(piece) >> np.uint32(_LOW_BITS)
        found += np.bincount(bins, minlength=_BINS)
        sums += np.bincount(bins, weights=squares, minlength=_BINS)

    # The n - k smallest are whole bins, and some elements of the next one.
    below = np.cumsum(found)
    kept = len(values) - counts
    border = np.searchsorted(below, kept, side="left")
    whole = np.concatenate(([0], below))[border]
    smaller = np.concatenate(([0.0], np.cumsum(sums)))[border]

    split, slots = np.unique(border, return_inverse=True)
    needed = kept - whole  # elements of the border's bin; 0 only if no element is left
    if found[split].sum() <= _FEW * len(split):
        return smaller + _by_sorting(values, split, found[split], slots.reshape(-1), needed)
    slot_of = np.full(_BINS, -1, np.int32)
    slot_of[split] = np.arange(len(split))
    within = np.zeros((len(split), _SPLIT), np.int64)
    for piece in _pieces(values):
        words = _magnitudes(piece)
        slot = slot_of[words >> np.uint32(_LOW_BITS)]
        here = slot >= 0
        places = slot[here] * np.int64(_SPLIT) + (words[here] & np.uint32(_SPLIT - 1))
        within += np.bincount(places, minlength=within.size).reshape(within.shape)

    rest = np.zeros(len(counts))
    for i in np.flatnonzero(needed):
        equal, slot = within[slots.reshape(-1)[i]], border[i]
        words = np.arange(slot << _LOW_BITS, (slot + 1) << _LOW_BITS, dtype=np.uint32)
        squares = np.square(words.view(np.float32), dtype=np.float64)
        reached = np.cumsum(equal)
        at = np.searchsorted(reached, needed[i], side="left")
        part = needed[i] - reached[at] + equal[at]
        rest[i] = smaller[i] + equal[:at] @ squares[:at] + part * squares[at]
    return rest


def _by_sorting(values: Floats, bins: Numbers, found: Numbers, slots: Numbers, needed: Numbers) -> Doubles:
    """Returns the energies of the ``needed[i]`` smallest elements of bin ``bins[slots[i]]``.

    Bins ascend, and bin j holds ``found[j]`` elements.
    """
    inside = np.zeros(_BINS, np.bool_)
    inside[bins] = True
    parts = [words[inside[words >> np.uint32(_LOW_BITS)]] for words in map(_magnitudes, _pieces(values))]
    together = np.concatenate(parts)
    together.sort()
    # The subtraction loses no precision that matters: the elements before a bin are part of the rest as well.
    sums = np.concatenate(([0.0], np.cumsum(np.square(together.view(np.float32), dtype=np.float64))))
    begins = (np.cumsum(found) - found)[slots]
    found_energies: Doubles = sums[begins + needed] - sums[begins]
    return found_energies


def _pieces(values: Floats) -> Iterator[Floats]:
    for start in range(0, len(values), _PIECE):
        yield values[start : start + _PIECE]


def _magnitudes(values: Floats) -> npt.NDArray[np.uint32]:
    """Returns the bits of |v|, which have the same order as the magnitudes."""
    words: npt.NDArray[np.uint32] = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return words
