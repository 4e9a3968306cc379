"""A controller for tests: it decides by what it sees, differently every time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp import LayerSpec
from gradcomp.control import Decision, Periodic, PeriodObservations
from gradcomp.testing.simulation import Simulation

LAYERS = [
    LayerSpec("a", (23, 5)),
    LayerSpec("b", (40,), "float16"),
    LayerSpec("c", (0,)),
    LayerSpec("d", (60,)),
    LayerSpec("e", (9,), "float64"),
]


@dataclass(frozen=True)
class Loudest(Periodic):
    """The more of the norm a layer has, the more bits; remembers how often it was asked, and by what."""

    name: ClassVar[str] = "loudest"

    @property
    def needs_errors(self):
        return True

    def begin_memory(self, candidates):
        return np.zeros(2)

    def decide(self, observed: PeriodObservations) -> Decision:
        order = np.argsort(np.argsort(observed.norm))
        width = np.array([len(c) for c in observed.candidates.choices])
        choices = (order + int(observed.memory[0])) % width
        return Decision(choices, observed.memory + np.array([1, observed.norm.sum()]), "by norm")


def levels(ranks: Simulation) -> list:
    """The plan's levels, which must be the same on all ranks."""
    plans = {p.plan.to_json() for p in ranks.pipelines}
    assert len(plans) == 1
    return [a.level for a in ranks.pipelines[0].plan.assignments]
