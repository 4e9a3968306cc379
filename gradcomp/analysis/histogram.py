"""Histograms: maps values to the numbers of bins, and counts bins."""

from __future__ import annotations

from dataclasses import dataclass
from math import cbrt, ceil
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError

Codes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Binning = Literal["uniform", "quantile"]

#: The quantiser of section III has 2^32 levels.
MOST_BINS = 2**32

#: Quantiles are computed one by one, so there are fewer of them.
MOST_QUANTILES = 2**16

#: Codes are sorted instead of counted in a table if the table would have more cells.
_MOST_CELLS = 2**20


@dataclass(frozen=True)
class Coded:
    """A vector as the numbers of its bins, 0 .. ``used`` - 1, each of which occurs."""

    codes: Codes
    counts: Counts

    @property
    def used(self) -> int:
        """Returns the number of bins that hold a value."""
        return len(self.counts)


def bins_for(elements: int, bins: int | None, binning: Binning) -> int:
    """Returns ``bins``, checked, or by default Rice's rule, ceil(2 m^(1/3)) for m elements."""
    if binning not in get_args(Binning):
        raise ConfigError(f"binning must be uniform or quantile, got {binning!r}")
    if bins is None:
        return max(2, ceil(round(2 * cbrt(elements), 9)))
    most = MOST_BINS if binning == "uniform" else MOST_QUANTILES
    if isinstance(bins, bool) or not isinstance(bins, int) or not 2 <= bins <= most:
        raise ConfigError(
            f"bins must be a whole number from 2 to {most} under {binning} binning, got {bins!r}"
        )
    return bins


def vector(values: Any, name: str) -> npt.NDArray[np.float64]:
    """Returns the values, flattened; ConfigError if they are fewer than two, not real numbers, or not finite."""
    try:
        found = np.asarray(values, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be an array of real numbers ({error})") from error
    if len(found) < 2:
        raise ConfigError(f"{name} has {len(found)} values; a histogram needs at least 2")
    if not np.isfinite(found).all():
        raise ConfigError(f"{name} has values that are not finite")
    return found


def coded(values: npt.NDArray[np.float64], bins: int, binning: Binning) -> Coded:
    """Returns the bin of every value.

    ``uniform``: bins of equal width from the smallest to the largest value, as in the paper's quantiser. ``quantile``:
    bins of nearly as many values each; equal values share a bin.
    """
    low, high = float(values.min()), float(values.max())
    if low == high:
        return Coded(np.zeros(len(values), dtype=np.int64), np.array([len(values)], dtype=np.int64))
    if binning == "uniform":
        # The difference of two values may overflow, that of scaled ones cannot.
        scale = max(abs(low), abs(high))
        shares = (values / scale - low / scale) / (high / scale - low / scale)
        codes = np.minimum((shares * bins).astype(np.int64), bins - 1)
    else:
        edges = np.quantile(values, np.arange(1, bins) / bins, method="inverted_cdf")
        codes = np.searchsorted(np.unique(edges), values, side="left")
    return dense(codes, bins)


def dense(codes: Codes, bins: int) -> Coded:
    """Renumbers codes below ``bins`` without gaps."""
    if bins > _MOST_CELLS:
        _, codes, counts = np.unique(codes, return_inverse=True, return_counts=True)
        return Coded(codes.reshape(-1).astype(np.int64), counts)
    counts = np.bincount(codes, minlength=bins)
    there = counts > 0
    return Coded((np.cumsum(there) - 1)[codes], counts[there])


def joint_counts(x: Coded, y: Coded) -> Counts:
    """Returns the number of elements in each pair of bins that occurs."""
    cells = x.codes * y.used + y.codes
    if x.used * y.used > _MOST_CELLS:
        counts: Counts = np.unique(cells, return_counts=True)[1]
        return counts
    counts = np.bincount(cells)
    return counts[counts > 0]
