"""Linear chooses levels by the order of gradient magnitude per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.control.grouped import Grouped
from gradcomp.control.observations import Numbers, PeriodObservations


@dataclass(frozen=True)
class Linear(Grouped):
    """Compresses a layer more the smaller its gradient is for its size, linearly in the order of layers.

    Layers are sorted by ||G_l|| / size_l, with G_l the gradient summed over a period. The first gets the most
    compression, the last the least: with L layers and n levels, the least compression first, the layer at position i
    (from 0) gets level number

        round((1 - i / (L-1)) (n-1))

    Equal layers keep their order in the model; a single layer uses the reference. If nothing is within the budget, all
    layers use the reference, and a warning is logged once.

    Args:
        every_steps: steps in a period.
        levels: candidates, which are levels or compressors; by default L-GreCo's range around the layer's own level.
        alpha: budget on the sum of the layers' errors, relative to the reference's, met as ``KMeans`` does. With None
            there is no budget, as in the source; the layers may then send several times as much as the reference.
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64, 4 numbers and one per level for each layer; then 1.

    State: a flag that the warning was given; the sums of :class:`Periodic`.

    Errors: ConfigError if ``levels`` is empty or has a level that layers cannot take, or if alpha is not above 0.

    Source: Markov 2024, section 3.6.
    Differences: the source has neither the budget nor levels other than bits. Without the budget TopK sent 1.6 and 2.1
    times the bytes of the uniform level.
    """

    name: ClassVar[str] = "linear"

    alpha: float | None = 1.0

    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Returns every layer as a group, the largest norm per element first."""
        rows = np.flatnonzero(~observed.silent)
        density = observed.norm[rows] / [observed.candidates.specs[row].size for row in rows]
        return [rows[i : i + 1] for i in np.argsort(density, kind="stable")[::-1]]
