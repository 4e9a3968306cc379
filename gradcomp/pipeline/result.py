"""What all ranks know at the end of an exchange."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a finished exchange. One boolean per layer; equal on all ranks.

    ``present``: some rank had a dense gradient. ``sparse``: some rank had a sparse one. ``nonfinite``: some rank had a
    NaN or an infinity, or the mean overflowed. ``outcomes``: what became of the exchange before, as bits of all ranks.
    ``notices``: LATE of this exchange, EDITED of the one before, DIFFERENT, if some rank said so. ``results``: a check
    value of all coded means as this rank decodes them, the same on all ranks unless something is wrong; of sums it has
    no part.
    """

    step: int
    present: Mask
    sparse: Mask
    nonfinite: Mask
    outcomes: int = 0
    notices: int = 0
    results: int = 0

    @property
    def finite(self) -> bool:
        """Whether the step may be committed."""
        return not self.nonfinite.any()

    @property
    def parted(self) -> bool:
        """Whether some ranks applied the means of the exchange before, and others did something else."""
        return self.outcomes & (self.outcomes - 1) != 0
