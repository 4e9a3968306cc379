"""Compressors that send all elements above a threshold: Threshold, RedSync, SIDCo, and by bins AdaComp."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_number, check_positive, check_whole, check_word, is_number
from gradcomp.compress.messages import Bytes
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import LEAST_MAGNITUDE, ByDensity, Sparse, elements_at
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: The most passes of a bisection over a layer.
PASSES = 20
DISTRIBUTIONS = ("exponential", "pareto")
#: A stage keeps this share of what is left, unless it is the last one or may keep more.
STAGE_SHARE = 0.25
#: Stages end at a count within this relative distance above k.
TOLERANCE = 0.2
# Equal magnitudes have no variance, and the ratio would be infinite.
_LARGEST_RATIO = 1e6
_EXPONENTIAL = 1e-9


@dataclass(frozen=True)
class AboveThreshold(Sparse):
    """Base of the compressors with S = {i: |p_i| >= t}.

    If these are more than ``limits``, the largest of them are sent (ties to the lower index). Elements of 0 are not
    selected, whatever the threshold; a row that is not finite selects nothing.
    """

    by_kernels = True

    @abstractmethod
    def thresholds(self, device: Device, table: Table, wanted: Sizes, step: int) -> Floats:
        """Return every row's threshold: p lies in its next residual and is finite; ``wanted`` is the level."""

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """Select the elements that reach the threshold; a row that is not finite sends nothing."""
        table = group.inputs
        kernels = group.device.kernels
        kernels.contribute(table, flags, context.factors(len(table)), decay=context.decay)
        finite = flags == 0
        thresholds = np.full(len(table), np.nan, dtype=np.float32)  # no element reaches NaN
        rows = table[finite]
        thresholds[finite] = self.thresholds(
            group.device, rows, rows["level"].astype(np.int64), context.draw.step
        )
        thresholds = np.maximum(thresholds, LEAST_MAGNITUDE)
        limits = group.scratch.once("limits", lambda: self.limits(group.table))
        kernels.select_above(table, thresholds, limits, *chosen.arrays)


@dataclass(frozen=True)
class EstimatedThreshold(ByDensity, AboveThreshold):
    """Base of the compressors whose threshold is chosen for about k = round(density n) elements."""


@dataclass(frozen=True, eq=False)
class Tails:
    """Hold, of the elements of each row with |p| >= its threshold: number, sums of |p| and |p|^2, and largest |p|."""

    counts: Sizes
    sums: Doubles
    squares: Doubles
    maxima: Floats

    @staticmethod
    def of(device: Device, table: Table, thresholds: Floats) -> Tails:
        """Make one pass over the rows."""
        rows = len(table)
        found = Tails(np.zeros(rows, np.int64), np.zeros(rows), np.zeros(rows), np.zeros(rows, np.float32))
        device.kernels.tail(table, thresholds, found.counts, found.sums, found.squares, found.maxima)
        return found

    def at(self, rows: npt.NDArray[np.bool_]) -> Tails:
        """Return the values of a subset of the rows."""
        return Tails(self.counts[rows], self.sums[rows], self.squares[rows], self.maxima[rows])


@register("threshold")
@dataclass(frozen=True)
class Threshold(AboveThreshold):
    """Send every element of magnitude lambda or more; the data decide how many these are.

    S = {i : |p_i| >= ``threshold``}, with lambda = ``threshold`` in units of the gradient, without loss scale. Of a
    layer with more such elements than round(``capacity`` n), the largest are sent, ties by lower index. The level is
    the threshold.

    If values travel exactly, every element of a residual is smaller than lambda, unless ``capacity`` has cut a
    selection off. Coded values leave their coding error, which may be larger.

    Wire: for every layer its count (4 bytes), coded indices and values, to all ranks: (N - 1) d bytes per rank for a
    payload of d bytes; one round, or two where it grows. ``wire_bytes`` is that of layers filled to capacity.
    State: a residual per layer.
    Errors: ConfigError for a threshold that is not a positive float32, or a capacity outside (0, 1].
    Source: Sahu et al. 2021, "Rethinking gradient sparsification as total error minimization", as Markov et al. 2024,
    section 5, compare L-GreCo with it (Markov 2024, section 4.6.3: lambda = 4.72e-3 for ResNet-18).
    Differs: ``capacity``, which bounds a step's bytes.
    """

    level_field: ClassVar[str | None] = "threshold"

    threshold: float = 0.01
    capacity: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_threshold(self.threshold)
        check_number("density", self.capacity, "(0, 1]")

    def fill(self, table: Table, level: Level) -> None:
        """Write the bits of the threshold as float32 into the column of the level."""
        _check_threshold(level)
        table["level"] = np.array(level, dtype=np.float32).view(np.int32)
        table["bucket_size"] = 1

    def limits(self, table: Table) -> Sizes:
        return elements_at(self.capacity, table["length"].astype(np.int64))

    def thresholds(self, device: Device, table: Table, wanted: Sizes, step: int) -> Floats:
        """Read the thresholds from the column of the level."""
        return table["level"].astype(np.int32).view(np.float32)


def _check_threshold(threshold: Level) -> None:
    with np.errstate(all="ignore"):
        if not is_number(threshold) or not 0 < np.float32(threshold) < np.inf:
            raise ConfigError(f"threshold must be a positive float32, got {threshold!r}")


@register("redsync")
@dataclass(frozen=True)
class RedSync(EstimatedThreshold):
    """Send between k and (1 + tolerance) k elements of each layer, above a threshold that bisection finds.

    t = mean |p| + r (max |p| - mean |p|), with r in [0, 1] by bisection until k <= #{|p| >= t} <= (1 + tolerance) k,
    k = round(density n); S = {i: |p_i| >= t}. If fewer than k elements reach the mean, as at high densities, t is
    between 0 and the mean. If 20 passes do not suffice (many equal magnitudes), the (1 + tolerance) k largest are sent.

    The paper's compressor that sends one mean per sign instead of the selected values is ``values=OneBit()``.

    Wire: at most ceil((1 + tolerance) k) values and coded indices, and their count (4 bytes per layer): one round, or
    two where a payload grows.
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1] or a tolerance that is not positive.
    Source: Fang et al. 2019, threshold binary search, as used in Tyagi and Swany 2023, section IV. Differs: the paper
    accepts up to 2k elements, which is ``tolerance=1.0``; it keeps thresholds for several steps, and here each step
    finds its own.
    """

    tolerance: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("tolerance", self.tolerance)

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Return the bound for the k largest elements, because at least those are sent."""
        return self.distortion_of_largest(self.sent_of(layer), layer)

    def limits(self, table: Table) -> Sizes:
        return self._most(super().limits(table), table)

    def _most(self, wanted: Sizes, table: Table) -> Sizes:
        most: Sizes = np.minimum(np.ceil((1.0 + self.tolerance) * wanted), table["length"]).astype(np.int64)
        return most

    def thresholds(self, device: Device, table: Table, wanted: Sizes, step: int) -> Floats:
        """Find thresholds by bisection; rows that have one are not read again."""
        most = self._most(wanted, table)
        if device.driver is not None:
            on_device: Floats = device.kernels.bisect(table, wanted, most, PASSES)
            return on_device
        found = np.zeros(len(table), dtype=np.float32)  # at least k elements reach it
        everything = Tails.of(device, table, found)
        high = everything.maxima
        rows = np.flatnonzero(most < table["length"])
        trial = (everything.sums[rows] / everything.counts[rows]).astype(np.float32)
        for _ in range(PASSES):
            counts = Tails.of(device, table[rows], trial).counts
            few, many = counts < wanted[rows], counts > most[rows]
            high[rows[few]] = trial[few]
            found[rows[~few]] = trial[~few]
            rows = rows[few | many]
            trial = found[rows] + (high[rows] - found[rows]) / np.float32(2)
            apart = (found[rows] < trial) & (trial < high[rows])  # else no float32 is left between the two
            rows, trial = rows[apart], trial[apart]
            if not len(rows):
                break
        return found


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
        check_whole("stages", self.stages)
        check_word("distribution", self.distribution, DISTRIBUTIONS)

    def limits(self, table: Table) -> Sizes:
        most: Sizes = np.minimum(2 * super().limits(table), table["length"])
        return most

    def thresholds(self, device: Device, table: Table, wanted: Sizes, step: int) -> Floats:
        """Find thresholds stage by stage; rows that have one are not read again."""
        found = np.zeros(len(table), dtype=np.float32)
        rows = np.flatnonzero(wanted < table["length"])
        left = Tails.of(device, table[rows], found[rows])
        for stage in range(1, self.stages + 1):
            share = wanted[rows] / left.counts
            if stage < self.stages:
                share = np.maximum(share, STAGE_SHARE)
            with np.errstate(over="ignore"):
                trial = (found[rows] + self._distance(share, left, found[rows])).astype(np.float32)
            after = Tails.of(device, table[rows], trial)
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


@register("adacomp")
@dataclass(frozen=True)
class AdaComp(Sparse):
    """Send the elements that another gradient like this one would make the largest of their bin; no density is chosen.

    G = p = g + e;  H = G + g;  S = {i: |H_i| >= max |G| over the bin of i, and that is not 0}, where bins are
    ``bin_size`` consecutive elements. The data decide how many these are: few where residuals are large, and none of a
    bin that holds only zeros. If they are more than ceil(limit n) elements of a layer, or than one per bin if that is
    more, the largest |G| are sent (without a residual, as in the first step, every element of at least half its bin's
    largest magnitude qualifies).

    The paper sends the sign of G times the layer's mean of the bins' maxima. Here values travel as ``values`` says:
    exactly by default; ``OneBit()`` is closest to the paper, with means per sign instead of the means of maxima.

    Wire: at most ceil(limit n) values and coded indices, or one per bin if that is more, and their count (4 bytes per
    layer): one round, or two where a payload grows.
    State: a residual per layer.
    Errors: ConfigError for a bin without elements or a limit outside (0, 1].
    Source: Chen et al. 2018, Algorithm 2, which Markov 2024 compares with in section 3.7.3; the paper has bins of 50
    for convolutions and 500 for other layers. Differs: ``limit``, zeros, and the values.
    """

    by_kernels = True

    bin_size: int = 500
    limit: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("bin_size", self.bin_size)
        check_number("limit", self.limit, "(0, 1]")

    def fill(self, table: Table, level: Level) -> None:
        table["level"], table["bucket_size"] = 1, 1

    def limits(self, table: Table) -> Sizes:
        """Return ceil(limit n), or the number of bins if that is more."""
        lengths = table["length"].astype(np.int64)
        bins = -(-lengths // self.bin_size)
        most: Sizes = np.minimum(np.maximum(np.ceil(self.limit * lengths).astype(np.int64), bins), lengths)
        return most

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """Select bin by bin; a row that is not finite sends nothing."""
        table, by = group.inputs, context.factors(len(group.inputs))
        group.device.kernels.contribute(table, flags, by, decay=context.decay)
        limits = group.scratch.once("limits", lambda: self.limits(group.table))
        most = np.where(flags == 0, limits, 0)
        group.device.kernels.select_adacomp(table, by, most, *chosen.arrays, bin_size=self.bin_size)
