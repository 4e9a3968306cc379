"""The forms of GraVAC's gain: which norms of a step stand above and below the line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcomp.compress.base import Compressor
from gradcomp.compress.sparse import two_level_selection as selection
from gradcomp.compress.sparse.drawn import Drawn
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.control.base import Doubles, Numbers
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.step import Observations

#: Observations in the order in which their sums are shared: of g, of p, and of what the two factors select of p.
SHARED = selection.GRADIENT, selection.TOTAL, selection.KEPT, selection.KEPT_BY_CANDIDATE
GRADIENT, TOTAL, KEPT, KEPT_BY_CANDIDATE = range(len(SHARED))


@dataclass(frozen=True)
class Form:
    """One form of the gain.

    ``saved``: its name in a checkpoint. ``whole``: the norm below the line, ``candidate``: the candidate's above it, as
    numbers of :data:`SHARED`. ``squared``: norms are squared. ``of_averages``: the gain is a quotient of two averages,
    and not an average of quotients.
    """

    saved: str | None
    whole: int = TOTAL
    candidate: int = KEPT_BY_CANDIDATE
    squared: bool = False
    of_averages: bool = False

    def sums(self, observations: Observations, layers: Numbers, row_of: Numbers, rows: int) -> Doubles:
        """Returns the norms, or squared norms, of every observation, summed over the layers of each row."""
        squares = [observations.of(name)[layers] for name in SHARED]
        parts = squares if self.squared else [np.sqrt(one) for one in squares]
        return np.stack([np.bincount(row_of, part, rows) for part in parts])

    def compared(self, sums: Doubles) -> tuple[Doubles, Doubles, Doubles]:
        """Returns by row what stands below the line, and above it for the minimum and for the candidate."""
        return sums[self.whole], sums[KEPT], sums[self.candidate]

    def check(self, compressor: Compressor, layer: str) -> None:
        """Raises ConfigError for a selection that has the same gain in this form, whatever the gradients are."""
        while isinstance(compressor, Wrapper):
            compressor = compressor.inner
        if self.squared and isinstance(compressor, Drawn):
            raise ConfigError(
                f"{layer}: a random selection at a factor f has a gain of 1/f by energy, so that {compressor.name} is "
                'never sent above f = 1/epsilon; use gain="norm" or gain="released"'
            )


NORM, ENERGY, RELEASED = "norm", "energy", "released"

#: The forms by the names of the option ``gain``. Checkpoints had no name for energy when it was the only form.
FORMS = {
    NORM: Form("bounded"),
    ENERGY: Form(None, squared=True),
    RELEASED: Form("released", GRADIENT, KEPT, of_averages=True),
}

#: The form that ``gain="norm"`` named before, of which checkpoints are continued: p above the line, g below.
UNBOUNDED = Form("norm", GRADIENT, of_averages=True)
