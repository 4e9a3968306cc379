"""Levels that follow the order of gradient magnitude per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.control.grouped import Grouped
from gradcomp.control.observations import Numbers, PeriodObservations


@dataclass(frozen=True)
class Linear(Grouped):
    """The smaller a layer's gradient for its size, the more it is compressed; linearly in the order of layers.

    Layers are sorted by ||G_l|| / size_l, G_l being the gradient added up over a period. The first gets the most
    compression that there is, the last the least, and with L layers and n levels, the least compression first, the one
    in place i (from 0) gets level number

        round((1 - i / (L-1)) (n-1))

    Equal layers keep their order in the model; a single layer takes the reference.

    Args:
        every_steps: steps in a period.
        levels: what layers may travel as, levels or compressors; by default L-GreCo's range around the layer's own.
        alpha: budget on the sum of the layers' errors, relative to the reference's, met as ``KMeans`` does; None for no
            budget, as in the source, which may send several times what the reference does.
        window: add up only the last so many steps of a period; by default all of them.
        samples: measure so many single steps of it instead; see :class:`Periodic`.
        memory_bytes: cap on what is held for sums, on every rank.

    Wire: twice a period a sum over ranks of float64, 4 numbers and one per level for each layer; then 1.

    State: whether the warning below was given; the sums of :class:`Periodic`.

    Raises:
        ConfigError: no levels, or a level that layers cannot take; alpha is not above 0.

    If nothing meets the budget, layers take the reference, and one warning says so.

    Source: Markov 2024, section 3.6. Differences: it has neither the budget nor levels other than bits. Without the
    budget TopK sent 1.6 and 2.1 times the bytes of the uniform level.
    """

    name: ClassVar[str] = "linear"

    alpha: float | None = 1.0

    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Every layer by itself, the largest norm per element first."""
        rows = np.flatnonzero(~observed.silent)
        density = observed.norm[rows] / [observed.candidates.specs[row].size for row in rows]
        return [rows[i : i + 1] for i in np.argsort(density, kind="stable")[::-1]]
