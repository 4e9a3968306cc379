"""AdaComp sends what one more gradient like this one would make the largest of its bin (Chen et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcomp.compress.messages import Bytes
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import Sparse
from gradcomp.compress.sparse.payload import Selection
from gradcomp.compress.sparse.threshold import is_number
from gradcomp.core.errors import ConfigError
from gradcomp.core.plan import Level
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext


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
        if isinstance(self.bin_size, bool) or not isinstance(self.bin_size, int) or self.bin_size < 1:
            raise ConfigError(f"bin_size must be a whole number of at least 1, got {self.bin_size!r}")
        if not is_number(self.limit) or not 0.0 < self.limit <= 1.0:
            raise ConfigError(f"limit must be in (0, 1], got {self.limit!r}")

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
        selection.contribute(table, flags, by, decay=context.decay)
        limits = group.scratch.once("limits", lambda: self.limits(group.table))
        selection.select_adacomp(
            table,
            by,
            np.where(flags == 0, limits, 0),
            chosen.offsets,
            chosen.indices,
            chosen.values,
            chosen.counts,
            bin_size=self.bin_size,
        )
