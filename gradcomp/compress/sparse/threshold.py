"""Threshold sends all elements that are large enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.compress.messages import Bytes
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import Sparse, check_density, elements_at
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.errors import ConfigError
from gradcomp.core.plan import Level
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext


@register("threshold")
@dataclass(frozen=True)
class Threshold(Sparse):
    """Send every element of magnitude lambda or more; the data decide how many these are.

    S = {i : |p_i| >= ``threshold``}, with lambda = ``threshold`` in units of the gradient, without loss scale. Of a
    layer with more such elements than round(``capacity`` n), the largest are sent, ties by lower index. The level is
    the threshold.

    Every element of a residual is smaller than lambda, unless ``capacity`` has cut a selection off.

    Wire: for every layer its count (4 bytes), coded indices and values, to all ranks: (N - 1) d bytes per rank for a
    payload of d bytes; one round, or two where it grows. ``wire_bytes`` is that of layers filled to capacity.
    State: a residual per layer.
    Errors: ConfigError for a threshold that is not a positive float32, or a capacity outside (0, 1].
    Source: Sahu et al. 2021, "Rethinking gradient sparsification as total error minimization", as Markov et al. 2024,
    section 5, compare L-GreCo with it (Markov 2024, section 4.6.3: lambda = 4.72e-3 for ResNet-18).
    Differs: ``capacity``, which bounds a step's bytes.
    """

    level_field: ClassVar[str | None] = "threshold"
    by_kernels = True

    threshold: float = 0.01
    capacity: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_threshold(self.threshold)
        check_density(self.capacity)

    def fill(self, table: Table, level: Level) -> None:
        """Write the bits of the threshold as float32 into the column of the level."""
        _check_threshold(level)
        table["level"] = np.array(level, dtype=np.float32).view(np.int32)
        table["bucket_size"] = 1

    def limits(self, table: Table) -> Sizes:
        return elements_at(self.capacity, table["length"].astype(np.int64))

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """Select all elements from the threshold on; a row that is not finite sends nothing."""
        table = group.inputs
        selection.contribute(table, flags, context.factors(len(table)), decay=context.decay)
        thresholds = np.where(flags, np.float32(np.nan), table["level"].astype(np.int32).view(np.float32))
        limits = group.scratch.once("limits", lambda: self.limits(table))
        selection.select_above(
            table, thresholds, limits, chosen.offsets, chosen.indices, chosen.values, chosen.counts
        )


def _check_threshold(threshold: Level) -> None:
    with np.errstate(all="ignore"):
        if (
            isinstance(threshold, bool)
            or not isinstance(threshold, int | float)
            or not 0 < np.float32(threshold) < np.inf
        ):
            raise ConfigError(f"threshold must be a positive float32, got {threshold!r}")
