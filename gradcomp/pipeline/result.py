"""At the end of an exchange all ranks know its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepResult:
    """Holds what all ranks know of a finished exchange: one boolean per layer, equal on all ranks.

    ``present``: some rank had a dense gradient. ``sparse``: some rank had a sparse one. ``nonfinite``: some rank
    had a NaN or an infinity, or the mean overflowed. ``outcomes`` has the outcomes of the exchange before, as bits
    of all ranks. ``notices`` has LATE of this exchange, EDITED of the one before, and DIFFERENT, each if some rank
    set it. ``results`` is a check value of all coded means as this rank decodes them, which differs between ranks
    only if something is wrong; sums are no part of it.
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
        """Return whether the step may be committed."""
        return not self.nonfinite.any()

    @property
    def parted(self) -> bool:
        """Return whether some ranks applied the means of the exchange before, and others did something else."""
        return self.outcomes & (self.outcomes - 1) != 0
