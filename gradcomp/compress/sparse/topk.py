"""TopK sends the largest elements of every layer, GlobalTopK those of the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_flag, check_number
from gradcomp.compress.messages import Bytes
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import LEAST_MAGNITUDE, ByDensity, Sparse
from gradcomp.compress.sparse.payload import Selection, places_of
from gradcomp.compress.sparse.threshold import Floats, Tails
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.step import StepContext

#: The table holds a density in whole numbers of this unit.
_DENSITY_UNITS = 1 << 30


@register("topk")
@dataclass(frozen=True)
class TopK(ByDensity, Sparse):
    """Send the k = round(density n) elements of largest magnitude of each layer, but none that is 0.

    S = the k largest |p|, at least one, without those that are 0. Ties go to the lower index, so that the selection is
    a function of the values. The level is the density.

    ``zeros``: send elements of 0 too, so that there are always k elements. With exact or cast values the mean is the
    same, bit for bit. A payload then has the same size in every step. On a GPU it is encoded in one call; without
    ``zeros`` it takes two, between which the counts are copied to the host. It is decoded in one call.

    Wire: for every layer its count (4 bytes) and min(k, non-zeros) values and coded indices, to all ranks: (N - 1) d
    bytes per rank for a payload of d bytes; one round, or two where it grows. With ``zeros`` there are k elements and
    no count, in one round. With exact values and the default coding a density of 1% costs 40.6 bits per element sent,
    where 32-bit indices would cost 64. ``wire_bytes`` is that of layers with k non-zeros.
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1], and for ``zeros`` that is neither true nor false.
    Source: Markov 2024, section 2.2.3 (Top-K); Markov et al. 2024. Selection is per layer, as in both. Differs: zeros
    are not sent by default.
    """

    by_kernels = in_one_call = True

    zeros: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("zeros", self.zeros)

    @property
    def fixed(self) -> bool:
        return self.zeros

    def distortion(self, layer: LayerSpec) -> Distortion:
        return self.distortion_of_largest(self.sent_of(layer), layer)

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        factors = context.factors(len(group.table))
        limits = group.scratch.once("limits", lambda: self.limits(group.table))
        group.device.kernels.select_top(
            group.inputs, flags, factors, limits, *chosen.arrays, decay=context.decay, zeros=self.zeros
        )


@register("global_topk")
@dataclass(frozen=True)
class GlobalTopK(Sparse):
    """Send the k = round(density n) elements of largest magnitude of the whole model of n elements, at least one.

    S = the k largest |p_i| over all layers together, or all that are not 0 if those are fewer; ties by layer, in the
    order in which layers travel, and then by lower index. Layers of small gradients may send nothing for a long time.
    Where densities differ by layer, k = round(sum over layers of density n). The level is the density.

    It is meant for comparison: the selection waits for the last gradient, so nothing overlaps with the backward pass.
    The model here is all that travels under this compressor in one dtype, without layers that were unused in the last
    steps.

    Wire: at most k values and their coded indices, and a count per layer (4 bytes), to all ranks: (N - 1) d bytes per
    rank for a payload of d bytes; one round, or two where it grows. ``wire_bytes`` divides k in proportion to n.
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1].
    Source: Markov et al. 2024, section 5.3; Markov 2024, section 4.6.3 (Global TopK).
    """

    level_field: ClassVar[str | None] = "density"

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("density", self.density, "(0, 1]")

    @cached_property
    def traits(self) -> Traits:
        return Traits(keeps_residual=self.feedback, contributes=True, whole_model=True)

    def fill(self, table: Table, level: Level) -> None:
        """Write the density in units of 2**-30 into the column of the level, because a row has no k of its own."""
        check_number("density", level, "(0, 1]")
        assert isinstance(level, int | float), "checked"
        table["level"] = round(level * _DENSITY_UNITS)
        table["bucket_size"] = 1

    def limits(self, table: Table) -> Sizes:
        """Return k or the row's length, because all k elements may lie in one layer."""
        return np.minimum(table["length"].astype(np.int64), elements_of_model(table))

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes as if every layer sent its share of k.

        Their sum is about the size of a payload, wherever the largest elements are.
        """
        table = group.table
        lengths = table["length"].astype(np.int64)
        ends = np.rint(np.cumsum(lengths) * (elements_of_model(table) / max(1, int(lengths.sum()))))
        shares = np.diff(ends, prepend=0).astype(np.int64)
        return self.format(table).wire_bytes(np.minimum(shares, lengths))

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """Select the k largest elements of all rows; a row that is not finite sends nothing."""
        table = group.inputs
        limits = group.scratch.once("limits", lambda: self.limits(table))
        count = group.scratch.once("count", lambda: elements_of_model(table))
        group.device.kernels.contribute(table, flags, context.factors(len(group.table)), decay=context.decay)
        thresholds = _common_threshold(group.device, table, flags, count)
        group.device.kernels.select_above(table, thresholds, limits, *chosen.arrays)
        _keep_largest(chosen, count)


def elements_of_model(table: Table) -> int:
    """Return k: the sum of density n over the rows, rounded; at least 1 if there are elements."""
    # Python's integers are exact, so all ranks get the same.
    lengths: list[int] = table["length"].tolist()
    densities: list[int] = table["level"].tolist()
    total = sum(n * density for n, density in zip(lengths, densities, strict=True))
    return min(max(1, round(total / _DENSITY_UNITS)), sum(lengths))


def _common_threshold(device: Device, table: Table, flags: Bytes, count: int) -> Floats:
    """Return a magnitude that at least ``count`` elements of all rows reach, if there are so many, and not many more.

    It is the same for all rows except flagged ones, which get NaN. Magnitudes are ordered as the bits that store them:
    a bisection of the bits finds the largest such magnitude in at most 32 passes. It stops when no more than twice
    ``count`` elements are left.
    """

    def at(bits: int) -> Floats:
        return np.where(flags, np.float32(np.nan), np.array(bits, dtype=np.uint32).view(np.float32))

    # Enough reach `low`, too few reach `high`.
    low = int(LEAST_MAGNITUDE.view(np.uint32))
    everything = Tails.of(device, table, at(low))
    found = int(everything.counts.sum())
    high = int(everything.maxima.max(initial=0).view(np.uint32)) + 1
    while found > 2 * count and high - low > 1:
        middle = (low + high) // 2
        beyond = int(Tails.of(device, table, at(middle)).counts.sum())
        if beyond >= count:
            low, found = middle, beyond
        else:
            high = middle
    return at(low)


def _keep_largest(chosen: Selection, count: int) -> None:
    """Keep the ``count`` largest of the selected elements, ties by row and then by index."""
    places = places_of(chosen)
    if len(places) <= count:
        return
    magnitudes = np.abs(chosen.values[places])
    smallest = np.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    kept = magnitudes > smallest
    ties = np.flatnonzero(magnitudes == smallest)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    rows = np.repeat(np.arange(len(chosen.counts)), chosen.counts)[kept]
    places = places[kept]
    chosen.counts[:] = np.bincount(rows, minlength=len(chosen.counts))
    into = places_of(chosen)
    chosen.indices[into], chosen.values[into] = chosen.indices[places], chosen.values[places]
