"""Entropy, mutual and conditional information of gradients (Abrahamyan et al. 2021, section III)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import cbrt, ceil
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gradcomp.compress.checks import check_whole
from gradcomp.core.errors import ConfigError

Floats = npt.NDArray[np.float64]

Codes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Binning = Literal["uniform", "quantile"]
#: The quantiser of section III has 2^32 levels.
MOST_BINS = 2**32
#: Quantiles are computed one by one, so there are fewer of them.
MOST_QUANTILES = 2**16
#: Codes are sorted instead of counted in a table if the table would have more cells.
_MOST_CELLS = 2**20
Correction = Literal["none", "miller-madow"]


def gaussian_information(correlation: float) -> float:
    """Returns the mutual information of two Gaussian variables in bits, I = - log2(1 - rho^2) / 2.

    It is infinite for rho of 1 or -1, NaN for NaN. Binned variables share less, and approach it with narrower bins.
    Raises ConfigError if the correlation is not in -1 .. 1.
    """
    if math.isnan(correlation):
        return correlation
    if not -1 <= correlation <= 1:
        raise ConfigError(f"a correlation must be in -1 .. 1, got {correlation!r}")
    return math.inf if abs(correlation) == 1 else max(0.0, -math.log2(1 - correlation**2) / 2)


def correlation_for(bits: float) -> float:
    """Returns the positive correlation at which :func:`gaussian_information` is ``bits``: sqrt(1 - 2^(-2 I))."""
    return bits if math.isnan(bits) else math.sqrt(max(0.0, 1 - 2 ** (-2 * bits)))


def gaussian_pair(correlation: float, elements: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Draws ``elements`` values of two standard Gaussian variables with this correlation."""
    if not -1 <= correlation <= 1:
        raise ConfigError(f"a correlation must be in -1 .. 1, got {correlation!r}")
    x, noise = np.random.default_rng(seed).standard_normal((2, elements))
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise


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
    # Bins that hold no value get no number.
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


@dataclass(frozen=True)
class Information:
    """The information that two vectors share, in bits per element; returned by :func:`mutual_information`.

    ``null``: the mean mutual information of shuffled pairs; ``null_deviation``: its standard deviation.
    ``correlation``: Pearson's rho, NaN if a vector is constant. ``x_bins``, ``y_bins``, ``cells``: the number of bins
    that hold a value, in the histograms of x, of y and of pairs.
    """

    elements: int
    bins: int
    entropy_x: float
    entropy_y: float
    joint: float
    null: float
    null_deviation: float
    correlation: float
    x_bins: int
    y_bins: int
    cells: int

    @property
    def mutual(self) -> float:
        """Returns I(X; Y) = H(X) + H(Y) - H(X, Y), which is equation 1."""
        return self.entropy_x + self.entropy_y - self.joint

    @property
    def conditional(self) -> float:
        """Returns H(Y | X) = H(X, Y) - H(X), the innovation of Y."""
        return self.joint - self.entropy_x

    @property
    def excess(self) -> float:
        """Returns the mutual information minus that of shuffled pairs."""
        return self.mutual - self.null

    @property
    def gaussian(self) -> float:
        """Returns the information of Gaussian variables of the same correlation: see :func:`gaussian_information`."""
        return gaussian_information(self.correlation)


def mutual_information(
    x: Any,
    y: Any,
    *,
    bins: int | None = None,
    binning: Binning = "uniform",
    correction: Correction = "none",
    shuffles: int = 4,
    seed: int = 0,
) -> Information:
    """Estimates the information of two vectors whose elements are pairs, by histograms.

    H(Y) = - sum_b p_b log2 p_b
    I(X; Y) = H(Y) - H(Y | X) = - sum_b p_b log2 p_b + sum_{a,b} p_ab log2 (p_ab / p_a)    (equation 1)

    p_a, p_b and p_ab are the fractions of the m elements in bins and in pairs of bins. The estimate is too high:
    independent vectors get about (cells - x_bins - y_bins + 1) / (2 m ln 2) bits, and log2 m once every element has its
    own bin, as with 2^32 bins. It should therefore be compared with ``null``: I after the elements of Y were shuffled,
    which removes all information.

    Args:
        x: an array of m elements, at least 2, of any shape.
        y: an array of m elements.
        bins: for each vector, from its own smallest to its own largest value; None: ceil(2 m^(1/3)). The paper
            quantises to 2^32 levels and does not say if its histogram has 2^32 bins.
        binning: ``"uniform"`` as in the paper, or ``"quantile"``: bins of nearly as many elements each, which neither
            depend on the range nor on the distributions of X and Y alone. At most 65,536 bins.
        correction: ``"miller-madow"`` adds (used - 1) / (2 m ln 2) bits to every entropy, so I may be negative. It is
            useless if most bins hold one element.
        shuffles: number of permutations over which ``null`` is averaged; 0: null is NaN.
        seed: seeds the permutations.

    Without a correction 0 <= I <= min(H(X), H(Y)) up to rounding, and I(X; X) = H(X). Not collective; without state.

    Raises:
        ConfigError: bad arguments, unequal lengths, or values that are not finite.

    Source: Abrahamyan et al. 2021, section III; Miller 1955 for the correction. The null is ours.
    """
    check_correction(correction, shuffles)
    left, right = vector(x, "x"), vector(y, "y")
    elements = len(left)
    if elements != len(right):
        raise ConfigError(
            f"x has {elements} values and y {len(right)}; they must have as many, as they are pairs"
        )
    count = bins_for(elements, bins, binning)
    a, b = coded(left, count, binning), coded(right, count, binning)
    counts = joint_counts(a, b)
    entropy_x, entropy_y = (_entropy(each.counts, correction) for each in (a, b))
    random, shuffled = np.random.default_rng(seed), []
    for _ in range(shuffles):
        joint = joint_counts(a, Coded(random.permutation(b.codes), b.counts))
        shuffled.append(entropy_x + entropy_y - _entropy(joint, correction))
    null = shuffled or [np.nan]
    return Information(
        elements=elements,
        bins=count,
        entropy_x=entropy_x,
        entropy_y=entropy_y,
        joint=_entropy(counts, correction),
        null=float(np.mean(null)),
        null_deviation=float(np.std(null)),
        correlation=_correlation(left, right),
        x_bins=a.used,
        y_bins=b.used,
        cells=len(counts),
    )


def entropy(
    x: Any, *, bins: int | None = None, binning: Binning = "uniform", correction: Correction = "none"
) -> float:
    """Returns H(X) = - sum_b p_b log2 p_b in bits per element; arguments as for :func:`mutual_information`."""
    check_correction(correction, 0)
    values = vector(x, "x")
    return _entropy(coded(values, bins_for(len(values), bins, binning), binning).counts, correction)


def check_correction(correction: Correction, shuffles: int) -> None:
    """Raises ConfigError for values that :func:`mutual_information` does not accept."""
    if correction not in get_args(Correction):
        raise ConfigError(f"correction must be none or miller-madow, got {correction!r}")
    check_whole("shuffles", shuffles, 0)


def _entropy(counts: Counts, correction: Correction) -> float:
    """Returns the entropy of bins with these counts, none of which is 0.

    H = log2 m - (1/m) sum c log2 c. Counts are sorted before they are summed, so that vectors with the same counts have
    the same entropy.
    """
    total = float(counts.sum())
    ordered = np.sort(counts).astype(np.float64)
    plain = max(0.0, float(np.log2(total) - (ordered * np.log2(ordered)).sum() / total))
    return plain + ((len(counts) - 1) / (2 * total * np.log(2)) if correction == "miller-madow" else 0.0)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Pearson's correlation of the values scaled to at most 1, whose squares neither overflow nor underflow."""
    if not np.ptp(x) or not np.ptp(y):
        return float("nan")
    x, y = (each / np.abs(each).max() for each in (x, y))
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / norm, -1.0, 1.0)) if norm > 0 else float("nan")


def total_information(phases: Iterable[tuple[int, Sequence[float]]]) -> float:
    """Returns the bytes that all ranks send during a whole training.

    B = sum over phases p of n_p sum over ranks k of b_{k,p}

    ``phases``: for each, its number of steps n_p and the bytes b_{k,p} that every rank k sends in one of them. A run
    with one compression has one phase; LGC has three.

    Raises:
        ConfigError: numbers that are negative or not finite, or phases with different numbers of ranks.

    Source: the column "Information" of Table II, which prints no formula. This one gives its rows, with 102.2 MB of
    gradient (Table IV) divided by the rows' ratios, 8 ranks, the 429,300 steps that follow from the baseline's 351 TB,
    and 200 uncompressed steps for LGC.
    """
    total, ranks = 0.0, None
    for steps, sent in phases:
        amounts = np.asarray(sent, dtype=np.float64)
        if amounts.ndim != 1 or (ranks is not None and len(amounts) != ranks):
            raise ConfigError("every phase needs the bytes of every rank")
        if not steps >= 0 or not (np.isfinite(amounts) & (amounts >= 0)).all():
            raise ConfigError("steps and bytes must be finite and 0 or more")
        ranks = len(amounts)
        total += steps * float(amounts.sum())
    return total
