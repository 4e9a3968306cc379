"""RedSync finds a threshold by bisection between the mean and the largest magnitude (Fang et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.estimated_threshold import EstimatedThreshold, Floats, Tails, is_number
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels import bodies
from gradcomp.kernels.codec import Sizes, Table

#: Bisection takes at most so many passes over a layer.
PASSES = 20


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
        if not is_number(self.tolerance) or not 0.0 < self.tolerance < np.inf:
            raise ConfigError(f"tolerance must be positive, got {self.tolerance!r}")

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Return the bound for the k largest elements, because at least those are sent."""
        return self.distortion_of_largest(self.sent_of(layer), layer)

    def limits(self, table: Table) -> Sizes:
        return self._most(super().limits(table), table)

    def _most(self, wanted: Sizes, table: Table) -> Sizes:
        most: Sizes = np.minimum(np.ceil((1.0 + self.tolerance) * wanted), table["length"]).astype(np.int64)
        return most

    def thresholds(self, table: Table, wanted: Sizes, step: int) -> Floats:
        """Find thresholds by bisection; rows that have one are not read again."""
        most = self._most(wanted, table)
        if (device := bodies.of(table)) is not None:
            on_device: Floats = device.bisect(table, wanted, most, PASSES)
            return on_device
        found = np.zeros(len(table), dtype=np.float32)  # at least k elements reach it
        everything = Tails.of(table, found)
        high = everything.maxima
        rows = np.flatnonzero(most < table["length"])
        trial = (everything.sums[rows] / everything.counts[rows]).astype(np.float32)
        for _ in range(PASSES):
            counts = Tails.of(table[rows], trial).counts
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
