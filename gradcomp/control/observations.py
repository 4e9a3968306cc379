"""What a periodic controller decides from, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gradcomp.control.base import Doubles
from gradcomp.control.candidates import CandidateLevels

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PeriodObservations:
    """What a decision is made from; equal on all ranks. Rows are layers that are up for choice, or blocks of them.

    ``norm``: L2 norm of the accumulated gradient; ``mean``, ``deviation``: of its elements. ``errors[i, k]``: L2 norm
    of what choice k of layer i loses of it, inf where there is none; None unless the controller ``needs_errors``.
    ``wire``: seconds that the layer's buckets spent on the wire in the period, in the mean over ranks; ``sent``: bytes
    that a rank sent for them, by formula. ``nonzero``: of layers with choices that leave zeros out, how many elements
    were not 0, in the mean; None if there is no such choice. ``position``: the bucket that the layer ends in.
    ``current``: the choice in force. ``memory``: what the last decision left. ``rate_fall``: by how much the learning
    rate fell since the period before, as a share of what it was.
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

    @cached_property
    def costs(self) -> Doubles:
        """Those of the candidates, in bytes per step and rank, for as many zeros as there were."""
        return self.candidates.costs if self.nonzero is None else self.candidates.expected_costs(self.nonzero)

    @property
    def silent(self) -> npt.NDArray[np.bool_]:
        """Layers of which there is nothing to decide by."""
        quiet: npt.NDArray[np.bool_] = self.norm == 0
        return quiet


@dataclass(frozen=True)
class Decision:
    """``choices[i]``: the choice of row i. ``memory``: for the next decision. ``reason``: one line for the log."""

    choices: Numbers
    memory: Doubles
    reason: str = ""
