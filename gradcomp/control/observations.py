"""The observations of a period, which a periodic controller gets, and the decision that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradcomp.control.base import Doubles, Mask, Numbers
from gradcomp.control.candidates import CandidateLevels


@dataclass(frozen=True, eq=False)
class PeriodObservations:
    """Measurements of a period, equal on all ranks. A row is a controlled layer, or a block of one.

    ``norm``: L2 norm of the accumulated gradient; ``mean``, ``deviation``: mean and standard deviation of its
    elements. ``errors[i, k]``: L2 error of choice k of row i on that gradient, inf if there is no choice k; None
    unless the controller ``needs_errors``. ``losses[i, k]``: absolute change of the training loss under choice k of
    row i, inf where it is not finite; None unless the controller ``needs_losses``. ``wire``: seconds that the layer's
    exchange buckets spent on the wire in the period, averaged over ranks; ``sent``: bytes that a rank sent for them,
    by formula. ``nonzero``: average number of nonzero elements, for rows with choices that leave zeros out; None if
    there is no such choice. ``position``: the last exchange bucket that the layer is in. ``current``: the current
    choice. ``memory``: what the previous decision stored. ``rate_fall``: the relative fall of the learning rate since
    the previous period.
    """

    step: int
    candidates: CandidateLevels
    norm: Doubles
    mean: Doubles
    deviation: Doubles
    errors: Doubles | None
    wire: Doubles
    sent: Doubles
    position: Numbers
    current: Numbers
    memory: Doubles
    rate_fall: float = 0.0
    nonzero: Doubles | None = None
    losses: Doubles | None = None

    @cached_property
    def costs(self) -> Doubles:
        """Returns the costs of the candidates in bytes per step and rank, for the observed number of zeros."""
        return self.candidates.costs if self.nonzero is None else self.candidates.expected_costs(self.nonzero)

    @property
    def silent(self) -> Mask:
        """Returns a mask of the rows without a gradient, for which there is nothing to decide by."""
        quiet: Mask = self.norm == 0
        return quiet

    def keeping_silent(self, choices: Numbers) -> Numbers:
        """Returns the choices, except that rows without a gradient keep their current ones."""
        return np.where(self.silent, self.current, choices).astype(np.int64)

    def total_error(self, choices: Numbers) -> float:
        """Returns the sum of the L2 errors of the rows that had a gradient."""
        assert self.errors is not None, "asked for"
        rows = np.flatnonzero(~self.silent)
        return float(self.errors[rows, choices[rows]].sum())

    def total_bytes(self, choices: Numbers) -> float:
        """Returns the bytes that a rank sends per step."""
        return float(self.costs[np.arange(len(choices)), choices].sum())


@dataclass(frozen=True)
class Decision:
    """The choice ``choices[i]`` of each row i, the ``memory`` for the next decision, and the ``reason`` for the log."""

    choices: Numbers
    memory: Doubles
    reason: str = ""
