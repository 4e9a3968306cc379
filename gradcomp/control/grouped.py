"""The base class of controllers that choose one level for a group of layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.candidates import CandidateLevels, Candidates
from gradcomp.control.checks import check_positive
from gradcomp.control.levels import check_levels, fallback, linear_map
from gradcomp.control.observations import Decision, Numbers, PeriodObservations
from gradcomp.control.periodic import Periodic


@dataclass(frozen=True)
class Grouped(Periodic):
    """Base of the controllers that map levels linearly to groups of layers, within a budget if ``alpha`` is given."""

    levels: Candidates | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels)
        if self.alpha is not None:
            check_positive("alpha", self.alpha)

    @property
    def needs_errors(self) -> bool:
        return self.alpha is not None

    def candidates(self) -> Candidates | None:
        return self.levels

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        return np.zeros(1)

    @abstractmethod
    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Returns the rows that had a gradient, in groups, the most sensitive first."""

    def decide(self, observed: PeriodObservations) -> Decision:
        groups = self.groups(observed)
        choices = linear_map(observed, groups, self.alpha)
        if choices is None:
            assert self.alpha is not None, "without a budget there is always a choice"
            return fallback(observed, self.name, self.alpha)
        return Decision(choices, observed.memory, f"{sum(map(len, groups))} layers in {len(groups)} groups")
