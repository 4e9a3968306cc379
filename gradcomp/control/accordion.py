"""Accordion compresses little while gradients change fast, and much otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.control.base import Doubles
from gradcomp.control.candidates import Candidate, CandidateLevels
from gradcomp.control.checks import check_positive
from gradcomp.control.levels import keeping_silent
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.two_levels import TwoLevels
from gradcomp.core.errors import ConfigError

#: Stands for the norm of a layer before its first period.
NEVER = -1.0


def critical(previous: Doubles, now: Doubles, eta: float) -> npt.NDArray[np.bool_]:
    """Returns a mask that is true where | ||g_prev|| - ||g_now|| | / ||g_prev|| >= eta.

    It is also true where there is no previous norm yet (:data:`NEVER`).
    """
    change = np.abs(previous - now)
    mask: npt.NDArray[np.bool_] = (previous < 0) | ((change >= eta * previous) & (change > 0))
    return mask


def remembered(previous: Doubles, now: Doubles) -> Doubles:
    """Returns the norms to compare the next period's with: a layer that had no gradient keeps its previous norm."""
    return np.where(now == 0, previous, now)


@dataclass(frozen=True)
class Accordion(TwoLevels):
    """Switches each layer between two levels: low compression in critical periods, high compression in all others.

    With g_p the gradient summed over period p, a layer's period is critical if

        | ||g_{p-1}|| - ||g_p|| | / ||g_{p-1}|| >= eta

    and its first period always is. A period in which the learning rate fell by the fraction ``rate_fall`` or more is
    critical for all layers. A decision applies to the next period; until the first one, layers use ``low``. A layer
    without a gradient in the period keeps its choice and its norm.

    Args:
        low: level of low compression, such as rank 4 of ``PowerSGD``, or a compressor or its string form.
        high: level of high compression, such as rank 1. Both are levels, or both are compressors.
        eta: threshold on the relative change of the norm, above 0.
        rate_fall: threshold on the relative fall of the learning rate from one period to the next, in (0, 1].
        every_steps: steps in a period.
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64: 4 numbers per layer, then 2 per layer.

    State: one norm per layer and the learning rate, the same on all ranks; the sums of :class:`Periodic`.

    Errors: ConfigError if ``low`` and ``high`` are equal, impossible or exchanged, if eta is not above 0, or if
    rate_fall is not in (0, 1].

    Source: Agarwal et al. 2021 (Accordion), as used by Markov et al. 2024 (L-GreCo), section 5.3, and Markov 2024,
    section 3.7.3, with eta = 0.5.
    Differences: each layer's norm is measured on the gradients of the rank that owns the layer. The authors treat any
    fall of the learning rate as critical, since their schedules seldom fall, and then to a half or less. With a
    schedule that falls a little in every step, all periods would be critical, hence the threshold. Learning rates are
    compared when ranks share their tables, as norms are.
    """

    name: ClassVar[str] = "accordion"

    eta: float = 0.5
    rate_fall: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("eta", self.eta)
        check_positive("rate_fall", self.rate_fall)
        if self.rate_fall > 1:
            raise ConfigError(
                f"rate_fall is a fraction of the learning rate, at most 1, got {self.rate_fall!r}"
            )

    @property
    def start(self) -> Candidate:
        """Returns ``low``, since the first period is critical."""
        return self.low

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        return np.full(len(candidates.layers), NEVER)

    def critical(self, previous: Doubles, observed: PeriodObservations) -> npt.NDArray[np.bool_]:
        """Returns a mask of the rows whose period is critical."""
        fell = observed.rate_fall >= self.rate_fall
        return critical(previous, observed.norm, self.eta) | fell

    def decide(self, observed: PeriodObservations) -> Decision:
        """Chooses low compression for layers in a critical period."""
        mask = self.critical(observed.memory, observed)
        high = np.array([len(choices) - 1 for choices in observed.candidates.choices], dtype=np.int64)
        choices = keeping_silent(observed, np.where(mask, 0, high))
        count = int((mask & ~observed.silent).sum())
        return Decision(
            choices,
            remembered(observed.memory, observed.norm),
            f"{count} of {len(choices)} layers are critical, the learning rate fell by {observed.rate_fall:.0%}",
        )
