"""Drawn is the base of the compressors whose indices every rank draws from the shared seed."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traits
from gradcomp.compress.messages import Bytes, Exchange
from gradcomp.compress.sparse.payload import Selection
from gradcomp.compress.sparse.summed import Floats, Summed
from gradcomp.core.errors import ConfigError
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Draw, Group, Table
from gradcomp.kernels.step import StepContext

Indices = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Drawn(Summed):
    """Base of the compressors whose indices are a function of seed, step and layer, so that no index is sent.

    ``scaled``: send p over its probability of being sent, so that the expected mean is the true one. ``feedback``: keep
    what was not sent; by default it is on unless ``scaled``.
    """

    density: float = 0.1
    scaled: bool = False
    feedback: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scaled, bool):
            raise ConfigError(f"scaled must be true or false, got {self.scaled!r}")
        if self.feedback is not None and not isinstance(self.feedback, bool):
            raise ConfigError(f"feedback must be true, false or none, got {self.feedback!r}")
        if self.scaled and self.feedback:
            raise ConfigError(
                "feedback of scaled values grows without bound, because more is sent than there is: use one of the two"
            )

    @cached_property
    def traits(self) -> Traits:
        """Return a residual as ``feedback`` says; by default there is one unless ``scaled``."""
        return Traits(
            keeps_residual=not self.scaled if self.feedback is None else self.feedback, contributes=True
        )

    @abstractmethod
    def draw(self, table: Table, draw: Draw) -> Indices:
        """Draw the indices of all rows, ascending in each."""

    @abstractmethod
    def weights(self, table: Table) -> Floats:
        """Return one over the probability of being sent, for every element that is sent."""

    def weigh(self, group: Group, values: Floats) -> Floats:
        """Return the values times their weights, if they are ``scaled``."""
        if not self.scaled:
            return values
        weighed: Floats = values * group.scratch.once("weights", lambda: self.weights(group.table))
        return weighed

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        chosen = group.scratch.once("chosen", lambda: Selection.allocate(self.limits(group.table)))
        table = group.inputs

        def prepare() -> Bytes:
            flags = np.zeros(len(table), dtype=np.uint8)
            selection.contribute(table, flags, context.factors(len(table)), decay=context.decay)
            chosen.indices[:] = self.draw(table, context.draw)
            return flags

        return (yield from self.sum_at(group, context, chosen, prepare))
