"""SIDCo takes a threshold from a distribution that is fitted to the magnitudes, and again to their tail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcomp.compress.registry import register
from gradcomp.compress.sparse.estimated_threshold import Doubles, EstimatedThreshold, Floats, Tails
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.codec import Sizes, Table

DISTRIBUTIONS = ("exponential", "pareto")

#: A stage keeps this share of what is left, unless it is the last one or may keep more.
STAGE_SHARE = 0.25

#: Stages end at a count within this relative distance above k.
TOLERANCE = 0.2


@register("sidco")
@dataclass(frozen=True)
class SIDCo(EstimatedThreshold):
    """Send about k elements of each layer, above a threshold from a fit to |p| in several stages.

    Stage i fits the exceedances x = |p| - t_{i-1} of the c elements with |p| >= t_{i-1}, t_0 = 0, and keeps the share
    delta_i = max(k / c, 1/4), in the last stage k / c, k = round(density n). With mean mu and variance s^2 of x:

    exponential: t_i = t_{i-1} - mu ln(delta_i);
    pareto (generalised, by moments): t_i = t_{i-1} + (sigma / xi) (delta_i^(-xi) - 1), xi = (1 - mu^2 / s^2) / 2,
    sigma = mu (mu^2 / s^2 + 1) / 2.

    Stages end when at most 1.2 k elements are left, and at the latest after ``stages``. A stage that would leave fewer
    than k / 2 is not used (equal magnitudes, tails that end suddenly). Of more than 2k elements the 2k largest are
    sent, so that a layer sends between k / 2 and 2k. Each stage reads the layer once.

    Wire: at most 2k values and coded indices, and their count (4 bytes per layer): one round, or two where a payload
    grows.
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1], an unknown distribution, or fewer than one stage.
    Source: Abdelmoniem et al. 2021, which Markov 2024 uses for Top-K in section 3.7.2. Differs: the paper adapts the
    number of stages from step to step, by what the last ones achieved; here every stage counts what it left, the next
    one starts from there, and nothing is kept between steps. There is no gamma distribution.
    """

    stages: int = 4
    distribution: str = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stages, bool) or not isinstance(self.stages, int) or self.stages < 1:
            raise ConfigError(f"stages must be a whole number of at least 1, got {self.stages!r}")
        if self.distribution not in DISTRIBUTIONS:
            raise ConfigError(
                f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {self.distribution!r}"
            )

    def limits(self, table: Table) -> Sizes:
        most: Sizes = np.minimum(2 * super().limits(table), table["length"])
        return most

    def thresholds(self, table: Table, wanted: Sizes, step: int) -> Floats:
        """Find thresholds stage by stage; rows that have one are not read again."""
        found = np.zeros(len(table), dtype=np.float32)
        rows = np.flatnonzero(wanted < table["length"])
        left = Tails.of(table[rows], found[rows])
        for stage in range(1, self.stages + 1):
            share = wanted[rows] / left.counts
            if stage < self.stages:
                share = np.maximum(share, STAGE_SHARE)
            with np.errstate(over="ignore"):
                trial = (found[rows] + self._distance(share, left, found[rows])).astype(np.float32)
            after = Tails.of(table[rows], trial)
            taken = 2 * after.counts >= wanted[rows]
            found[rows[taken]] = trial[taken]
            on = taken & (after.counts > (1 + TOLERANCE) * wanted[rows])
            rows, left = rows[on], after.at(on)
            if not len(rows):
                break
        return found

    def _distance(self, share: Doubles, left: Tails, threshold: Floats) -> Doubles:
        """Return the distance from the threshold to the quantile beyond which ``share`` of the rest lies."""
        mean = left.sums / left.counts
        mu = mean - threshold
        if self.distribution == "exponential":
            exponential: Doubles = -mu * np.log(share)
            return exponential
        variance = np.maximum(left.squares / left.counts - mean * mean, np.finfo(np.float64).tiny)
        ratio = np.minimum(mu * mu / variance, _LARGEST_RATIO)
        xi = (1 - ratio) / 2
        xi = np.where(np.abs(xi) < _EXPONENTIAL, _EXPONENTIAL, xi)  # the limit is the exponential
        sigma = mu * (ratio + 1) / 2
        pareto: Doubles = sigma / xi * np.expm1(-xi * np.log(share))
        return pareto


# Equal magnitudes have no variance, and the ratio would be infinite.
_LARGEST_RATIO = 1e6
_EXPONENTIAL = 1e-9
