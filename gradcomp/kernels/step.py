"""The step that compressors and reductions work in: its parameters, its state and its observations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import DoubleBuffer, Fields
from gradcomp.kernels.codec import Draw, Group, Sizes
from gradcomp.kernels.segments import OWNER_RANK

Floats = npt.NDArray[Any]


class Observations:
    """Numbers that compressors record while they encode a step, by name and layer, for a controller."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._noted: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, name: str, layers: Sizes, values: npt.NDArray[np.float64]) -> None:
        """Adds ``values[i]`` to the number of layer ``layers[i]``; the layers are distinct."""
        self.of(name)[layers] += values

    def of(self, name: str) -> npt.NDArray[np.float64]:
        """Returns the numbers of that name by layer; zeros where nothing was recorded."""
        return self._noted.setdefault(name, np.zeros(self._layers))


@dataclass(frozen=True)
class StepContext:
    """One step, as one rank takes part in it.

    ``draw``: coordinates of this rank's random numbers. ``world``: the number of ranks. ``scale`` multiplies gradients
    before they are encoded, and ``unscale`` the results: a loss scale and its inverse. ``average``: the result is the
    mean over ranks, else their sum. ``rate_ratio``: the last learning rate over this one, for residuals that follow
    it; ``decay``: the resulting factor of a group's residuals. ``momenta``: the optimizer's momentum by layer, where
    it is known. ``fields``: the state except residuals that compressors keep by layer. ``observations`` is set if a
    controller reads them. ``number``: the step's number. ``active``: the number of ranks by which the mean is taken
    where ranks have joined and ``divide="active"``; 0: all.
    """

    draw: Draw
    world: int
    scale: float = 1.0
    unscale: float = 1.0
    average: bool = True
    rate_ratio: float = 1.0
    decay: float = 1.0
    momenta: Floats | None = None
    fields: Fields | None = None
    observations: Observations | None = None
    number: int = 0
    active: int = 0

    @cached_property
    def shared(self) -> Draw:
        """Returns the coordinates of draws that do not depend on the rank, for owners of chunks."""
        return Draw(self.draw.seed, self.draw.step, OWNER_RANK)

    @property
    def divisor(self) -> float:
        """Returns the number that divides a sum over ranks to give the result."""
        return float(self.active or self.world) if self.average else 1.0

    @property
    def share(self) -> float:
        """Returns the factor that turns a mean over all ranks into one over those that train; 1 for a sum."""
        return self.world / self.active if self.average and self.active else 1.0

    @property
    def unscale_mean(self) -> float:
        """Returns the factor that turns the mean of encoded contributions into the result."""
        return self.unscale * (self.share if self.average else self.world)

    def of(self, group: Group) -> StepContext:
        """Returns the context for a group: a prepared gradient is scaled already."""
        return replace(
            self, scale=group.scale(self.scale), decay=group.decay_at(self.rate_ratio), rate_ratio=1.0
        )

    def factors(self, rows: int) -> Floats:
        """Returns the factor of every row's gradient, as kernels take it."""
        return np.full(rows, self.scale, dtype=np.float32)

    def field(self, name: str) -> DoubleBuffer:
        """Returns a field's values, by layer."""
        assert self.fields is not None, "a step that runs has its state"
        return self.fields[name]

    def load(self, name: str, layers: Sizes) -> Floats:
        """Returns a copy of a field's values for these layers, one layer after another."""
        return self.field(name).load(layers)

    def store(self, name: str, layers: Sizes, values: Floats) -> None:
        """Sets the values that the field will have for these layers once the step is accepted."""
        self.field(name).store(layers, values)
