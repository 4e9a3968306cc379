"""Entropy, and mutual and conditional information of two vectors (Abrahamyan et al. 2021, section III)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from gradcomp.analysis.gaussian import gaussian_information
from gradcomp.analysis.histogram import Binning, Coded, Counts, bins_for, coded, joint_counts, vector
from gradcomp.core.errors import ConfigError

Correction = Literal["none", "miller-madow"]


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
        y: an array of as many.
        bins: for each vector, from its own smallest to its own largest value; None: ceil(2 m^(1/3)). The paper
            quantises to 2^32 levels and does not say if its histogram has as many bins.
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
    shuffled = [
        entropy_x + entropy_y - joint for joint in _shuffled_joints(a, b, correction, shuffles, seed)
    ] or [np.nan]
    return Information(
        elements=elements,
        bins=count,
        entropy_x=entropy_x,
        entropy_y=entropy_y,
        joint=_entropy(counts, correction),
        null=float(np.mean(shuffled)),
        null_deviation=float(np.std(shuffled)),
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
    if isinstance(shuffles, bool) or not isinstance(shuffles, int) or shuffles < 0:
        raise ConfigError(f"shuffles must be a whole number of at least 0, got {shuffles!r}")


def _entropy(counts: Counts, correction: Correction) -> float:
    """Returns the entropy of bins with these counts, none of which is 0.

    H = log2 m - (1/m) sum c log2 c. Counts are sorted before they are summed, so that vectors with the same counts have
    the same entropy.
    """
    total = float(counts.sum())
    ordered = np.sort(counts).astype(np.float64)
    plain = max(0.0, float(np.log2(total) - (ordered * np.log2(ordered)).sum() / total))
    return plain + ((len(counts) - 1) / (2 * total * np.log(2)) if correction == "miller-madow" else 0.0)


def _shuffled_joints(x: Coded, y: Coded, correction: Correction, shuffles: int, seed: int) -> list[float]:
    random = np.random.default_rng(seed)
    pairs = (Coded(random.permutation(y.codes), y.counts) for _ in range(shuffles))
    return [_entropy(joint_counts(x, each), correction) for each in pairs]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Pearson's correlation of the values scaled to at most 1, whose squares neither overflow nor underflow."""
    if not np.ptp(x) or not np.ptp(y):
        return float("nan")
    x, y = (each / np.abs(each).max() for each in (x, y))
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / norm, -1.0, 1.0)) if norm > 0 else float("nan")
