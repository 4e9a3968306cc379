"""Levels that follow the order of gradient magnitude per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.checks import check_positive
from gradcomp.control.ladders import check_levels, fallback, linear_map
from gradcomp.control.menu import Candidates, Menu
from gradcomp.control.periodic import Decision, Periodic, Seen


@dataclass(frozen=True)
class Linear(Periodic):
    """The smaller a layer's gradient for its size, the more it is compressed; linearly in the order of layers.

    Layers are sorted by ||G_l|| / size_l, G_l being the gradient added up over a period. The first gets the most
    compression that there is, the last the least, and with L layers and n levels, the least compression first, the one
    in place i (from 0) gets level number

        round((1 - i / (L-1)) (n-1))

    Equal layers keep their order in the model; a single layer takes the reference.

    Args:
        every_steps: steps in a period.
        levels: what layers may travel as, levels or compressors; by default 000's range around the layer's own level.
        alpha: budget: while the sum of the layers' errors is above alpha times the reference's, the layer with the most
            compression, of several the most sensitive, goes one level back. None: no budget, as in the source.
        window: add up only the last so many steps of a period; by default all of them.
        memory_bytes: cap on what is held for sums, on every rank.

    Wire: twice a period a sum over ranks of float64, 4 numbers and then 1 per layer; with a budget also one per level.

    State: whether the warning below was given; the sums of :class:`Periodic`.

    Raises:
        ConfigError: no levels, or a level that layers cannot take; alpha is not above 0.

    If nothing meets the budget, layers take the reference, and one warning says so.

    Source: 002, section 3.6. Differences: the paper has neither the optional budget nor levels other than bits.
    """

    name: ClassVar[str] = "linear"

    levels: Candidates | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels)
        if self.alpha is not None:
            check_positive("alpha", self.alpha)
        object.__setattr__(self, "needs_errors", self.alpha is not None)

    def candidates(self) -> Candidates | None:
        """As given."""
        return self.levels

    def begin_memory(self, menu: Menu) -> Doubles:
        """No warning yet."""
        return np.zeros(1)

    def decide(self, seen: Seen) -> Decision:
        """Every layer is a group of its own, the largest norm per element first."""
        rows = np.flatnonzero(~seen.silent)
        density = seen.norm[rows] / [seen.menu.specs[row].size for row in rows]
        groups = [rows[i : i + 1] for i in np.argsort(density, kind="stable")[::-1]]
        choices = linear_map(seen, groups, self.alpha)
        if choices is None:
            assert self.alpha is not None, "without a budget there is always a choice"
            return fallback(seen, self.name, self.alpha)
        return Decision(choices, seen.memory, f"{len(groups)} layers by norm per element")
