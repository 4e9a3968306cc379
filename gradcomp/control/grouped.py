"""What controllers have in common that sort groups of layers by how sensitive they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.checks import check_positive
from gradcomp.control.ladders import check_levels, fallback, linear_map
from gradcomp.control.menu import Candidates, Menu
from gradcomp.control.periodic import Periodic
from gradcomp.control.seen import Decision, Numbers, Seen


@dataclass(frozen=True)
class Grouped(Periodic):
    """Base of the controllers that map levels linearly onto groups of layers, within a budget if ``alpha`` is given."""

    levels: Candidates | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels)
        if self.alpha is not None:
            check_positive("alpha", self.alpha)

    @property
    def needs_errors(self) -> bool:
        """For a budget."""
        return self.alpha is not None

    def candidates(self) -> Candidates | None:
        """As given."""
        return self.levels

    def begin_memory(self, menu: Menu) -> Doubles:
        """No warning yet."""
        return np.zeros(1)

    @abstractmethod
    def groups(self, seen: Seen) -> Sequence[Numbers]:
        """Rows of which something was seen, in groups, the most sensitive first."""

    def decide(self, seen: Seen) -> Decision:
        """See :func:`linear_map`."""
        groups = self.groups(seen)
        choices = linear_map(seen, groups, self.alpha)
        if choices is None:
            assert self.alpha is not None, "without a budget there is always a choice"
            return fallback(seen, self.name, self.alpha)
        return Decision(choices, seen.memory, f"{sum(map(len, groups))} layers in {len(groups)} groups")
