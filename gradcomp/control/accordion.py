"""Low compression while gradients change fast, high compression otherwise."""

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

#: In place of a norm: there was no period yet.
NEVER = -1.0


def critical(previous: Doubles, now: Doubles, eta: float) -> npt.NDArray[np.bool_]:
    """Where | ||g_prev|| - ||g_now|| | / ||g_prev|| >= eta, and where there is no ||g_prev|| yet (:data:`NEVER`)."""
    change = np.abs(previous - now)
    mask: npt.NDArray[np.bool_] = (previous < 0) | ((change >= eta * previous) & (change > 0))
    return mask


def remembered(previous: Doubles, now: Doubles) -> Doubles:
    """The norms to compare the next period's with: a layer that had no gradient keeps its last one."""
    return np.where(now == 0, previous, now)


@dataclass(frozen=True)
class Accordion(TwoLevels):
    """Two levels per layer: low compression in critical periods, high compression in all others.

    With g_p the gradient added up over period p, a layer's period is critical where

        | ||g_{p-1}|| - ||g_p|| | / ||g_{p-1}|| >= eta

    and the first one always is. A period in which the learning rate fell by ``rate_fall`` of itself or more is critical
    for all layers. The decision is for the period that follows; until the first one layers travel at ``low``. A layer
    of which no gradient was seen keeps its choice and its norm.

    Args:
        low: level of low compression, such as the rank 4 of ``PowerSGD``, or a compressor or its string form.
        high: of high compression, such as rank 1. Both are levels, or both are compressors.
        eta: threshold on the relative change of the norm, above 0.
        rate_fall: threshold on the relative fall of the learning rate from one period to the next, in (0, 1].
        every_steps: steps in a period.
        window: add up only the last so many steps of it; by default all of them.
        samples: measure so many single steps of it instead; see :class:`Periodic`.
        memory_bytes: cap on what is held for sums, on every rank.

    Wire: twice a period a sum over ranks of float64, 4 numbers and then 2 per layer.

    State: one norm per layer and the learning rate, the same on all ranks; the sums of :class:`Periodic`.

    Raises:
        ConfigError: ``low`` and ``high`` are the same, impossible, or the wrong way round; eta is not above 0;
            rate_fall is not in (0, 1].

    Source: Agarwal et al. 2021 (Accordion), as Markov et al. 2024 (L-GreCo), section 5.3, and Markov
    2024, section 3.7.3, use it; eta = 0.5 is theirs.
    Differences: each layer's norm is of the gradients of the one rank that looks after it. To the authors any fall of
    the learning rate is critical; theirs fall now and then, to a half or less. Where it falls a little in every step,
    all periods would be critical, hence a threshold. Rates are compared when tables are shared, as norms are.
    """

    name: ClassVar[str] = "accordion"

    eta: float = 0.5
    rate_fall: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("eta", self.eta)
        check_positive("rate_fall", self.rate_fall)
        if self.rate_fall > 1:
            raise ConfigError(f"rate_fall is a share of the learning rate, at most 1, got {self.rate_fall!r}")

    @property
    def start(self) -> Candidate:
        """Low compression: the first period is critical."""
        return self.low

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        """No norm yet."""
        return np.full(len(candidates.layers), NEVER)

    def critical(self, previous: Doubles, observed: PeriodObservations) -> npt.NDArray[np.bool_]:
        """The layers whose period is critical."""
        fell = observed.rate_fall >= self.rate_fall
        return critical(previous, observed.norm, self.eta) | fell

    def decide(self, observed: PeriodObservations) -> Decision:
        """Low compression for layers in a critical period."""
        mask = self.critical(observed.memory, observed)
        high = np.array([len(choices) - 1 for choices in observed.candidates.choices], dtype=np.int64)
        choices = keeping_silent(observed, np.where(mask, 0, high))
        count = int((mask & ~observed.silent).sum())
        return Decision(
            choices,
            remembered(observed.memory, observed.norm),
            f"{count} of {len(choices)} layers are critical, the learning rate fell by {observed.rate_fall:.0%}",
        )
