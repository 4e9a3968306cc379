"""What compressors and reductions know of the step that they work in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import DoubleBuffer, Fields
from gradcomp.kernels.codec import Draw, Group, Sizes

Floats = npt.NDArray[Any]


class Observations:
    """What compressors note of a step while they encode it, by name and layer: for a controller."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._noted: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, name: str, layers: Sizes, values: npt.NDArray[np.float64]) -> None:
        """Add ``values[i]`` to what is noted of layer ``layers[i]``; no layer twice."""
        self.of(name)[layers] += values

    def of(self, name: str) -> npt.NDArray[np.float64]:
        """By layer number; zeros where nothing was noted."""
        return self._noted.setdefault(name, np.zeros(self._layers))


@dataclass(frozen=True)
class StepContext:
    """One step, as one rank takes part in it.

    ``draw``: where this rank's random numbers come from. ``world``: how many ranks there are. ``scale`` multiplies
    gradients before they are encoded, and ``unscale`` the results: a loss scale and its inverse. ``average``: the
    result is the mean over ranks, else their sum. ``rate_ratio``: the last learning rate over this one, for residuals
    that follow it; ``decay``: what that makes of the residuals of a group. ``momenta``: the optimizer's momentum, by
    layer, where it is known. ``fields``: the state that compressors keep by layer, beside residuals. ``observations``
    is there if a controller looks on. ``number``: of the step.
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

    @property
    def divisor(self) -> float:
        """Turns a sum over ranks into the result."""
        return float(self.world) if self.average else 1.0

    @property
    def unscale_mean(self) -> float:
        """Turns the mean of what was encoded into the result."""
        return self.unscale * (1 if self.average else self.world)

    def of(self, group: Group) -> StepContext:
        """The context as the group sees it: a prepared gradient is scaled already."""
        return replace(
            self, scale=group.scale(self.scale), decay=group.decay_at(self.rate_ratio), rate_ratio=1.0
        )

    def factors(self, rows: int) -> Floats:
        """The factor of every row's gradient, as kernels take it."""
        return np.full(rows, self.scale, dtype=np.float32)

    def field(self, name: str) -> DoubleBuffer:
        """A field's values, by layer."""
        assert self.fields is not None, "state is there when a step runs"
        return self.fields[name]

    def load(self, name: str, layers: Sizes) -> Floats:
        """The layers' values of a field, one behind the other: a copy."""
        return self.field(name).load(layers)

    def store(self, name: str, layers: Sizes, values: Floats) -> None:
        """What the field holds for these layers once the step is accepted."""
        self.field(name).store(layers, values)
