"""Controllers that switch layers between two levels: Accordion and AdaQS."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.checks import check_number, check_positive, is_number
from gradcomp.control.base import ControllerRun, Doubles, Environment, Mask
from gradcomp.control.candidates import Candidate, CandidateLevels, checked, make_candidates, resolve
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic import Periodic, PeriodicRun
from gradcomp.core.errors import ConfigError

#: Stands for the norm of a layer before its first period.
NEVER = -1.0


@dataclass(frozen=True)
class TwoLevels(Periodic):
    """Base of the controllers between ``low`` and ``high``: two levels, or two compressors of any family.

    Of ``compression=`` only the family is used, not the level: choices go from ``low``, first, to ``high``, last.
    """

    #: The field with the choice of all layers until the first decision.
    START: ClassVar[str]

    every_steps: int = field(kw_only=True)
    low: Candidate
    high: Candidate

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = checked(self.low, "low"), checked(self.high, "high")
        if isinstance(low, Compressor) != isinstance(high, Compressor):
            raise ConfigError(
                f"low and high must both be levels, or both compressors, got {self.low!r} and {self.high!r}"
            )
        if low == high:
            raise ConfigError(f"low and high must differ, got {self.low!r} twice")

    def candidates(self) -> list[Candidate]:
        return [self.low, self.high]

    def candidate_levels(self, environment: Environment) -> CandidateLevels:
        """Returns the candidates, with the one of :attr:`START` as reference.

        ConfigError if low compression sends less than high.
        """
        begin = getattr(self, self.START)
        own = [None if c is None else resolve(c, begin) for c in environment.compressors]
        candidates = make_candidates(replace(environment, compressors=own), self.candidates())
        sent = [candidates.bytes_of(row) for row in range(len(candidates.choices))]
        if sum(s[0] for s in sent) < sum(s[-1] for s in sent):
            raise ConfigError(
                f"{self.name}: low compression, {self.low!r}, sends fewer bytes than high compression, {self.high!r}: "
                "swap low and high"
            )
        return candidates

    def begin(self, environment: Environment) -> ControllerRun:
        """Returns a run whose layers begin at the choice of :attr:`START`, whatever the plan says."""
        running = PeriodicRun(self, environment)
        running.choose()
        return running


def critical(previous: Doubles, now: Doubles, eta: float) -> Mask:
    """Returns a mask that is true where | ||g_prev|| - ||g_now|| | / ||g_prev|| >= eta.

    It is also true where there is no previous norm yet (:data:`NEVER`).
    """
    change = np.abs(previous - now)
    return (previous < 0) | ((change >= eta * previous) & (change > 0))


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
    START: ClassVar[str] = "low"  # the first period is critical

    eta: float = 0.5
    rate_fall: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("eta", self.eta)
        check_number("rate_fall", self.rate_fall, "(0, 1]")

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        return np.full(len(candidates.layers), NEVER)

    def critical(self, previous: Doubles, observed: PeriodObservations) -> Mask:
        """Returns a mask of the rows whose period is critical."""
        return critical(previous, observed.norm, self.eta) | (observed.rate_fall >= self.rate_fall)

    def decide(self, observed: PeriodObservations) -> Decision:
        """Chooses low compression for layers in a critical period."""
        mask = self.critical(observed.memory, observed)
        high = np.array([len(choices) - 1 for choices in observed.candidates.choices], dtype=np.int64)
        choices = observed.keeping_silent(np.where(mask, 0, high))
        count = int((mask & ~observed.silent).sum())
        fall = f"the learning rate fell by {observed.rate_fall:.0%}"
        reason = f"{count} of {len(choices)} layers are critical, {fall}"
        return Decision(choices, remembered(observed.memory, observed.norm), reason)


@dataclass(frozen=True)
class AdaQS(TwoLevels):
    """Raises a layer's precision when the mean of its gradient falls relative to the standard deviation.

    For a layer's gradient summed over a period, with mean μ and standard deviation σ over its elements,

        m = |μ| / σ

    Layers begin at ``high`` compression, and a layer's first m > 0 is stored as m_0. Whenever m <= factor m_0, the
    layer moves one step towards ``low``, and m_0 = m; if that is 0, the next m > 0 replaces it. Steps double the level:
    high, 2 high, 4 high, ..., low; between two compressors there is one step. Precision never falls again. A layer
    without a gradient, or whose elements are all equal (σ = 0), keeps its choice and its m_0.

    Args:
        low: level of low compression, such as 8 bits, or a compressor or its string form.
        high: level of high compression, such as 2 bits. Both are levels, or both are compressors.
        factor: the fraction of m_0 to which m must fall, between 0 and 1.
        every_steps: steps in a period.
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64: 4 numbers per layer, then 2 per layer.

    State: one ratio per layer, the same on all ranks; the sums of :class:`Periodic`.

    Errors: ConfigError if ``low`` and ``high`` are equal, impossible or exchanged, or if factor is not in (0, 1).

    Source: the idea of Guo et al. 2020 (AdaQS, Accelerating distributed deep learning by adaptive gradient
    quantization), as described by Markov 2024 and by Tyagi and Swany 2023 (section II-C). The original text was not
    available, so the rule is ours where these two leave it open.
    Differences: the rule works per layer instead of on the whole model, and with exact moments instead of estimates.
    """

    name: ClassVar[str] = "adaqs"
    START: ClassVar[str] = "high"

    factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.factor) or not 0 < self.factor < 1:
            raise ConfigError(f"factor must be between 0 and 1, got {self.factor!r}")
        self.candidates()

    def candidates(self) -> list[Candidate]:
        """Returns the levels from ``low`` to ``high``, each half of the one before."""
        low, high = checked(self.low, "low"), checked(self.high, "high")
        if isinstance(low, Compressor) or isinstance(high, Compressor):
            return [self.low, self.high]
        if not 0 < high < low:
            raise ConfigError(
                f"high must be a level above 0 and below low, whose compression is lower, got {high!r} and {low!r}"
            )
        levels: list[Candidate] = []
        while high < low:
            levels.insert(0, high)
            high = 2 * high
        return [low, *levels]

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        return np.zeros(len(candidates.layers))

    def decide(self, observed: PeriodObservations) -> Decision:
        """Moves the layers whose ratio has fallen one step towards ``low``."""
        known = ~observed.silent & (observed.deviation > 0)
        ratio = np.divide(np.abs(observed.mean), observed.deviation, out=np.zeros(len(known)), where=known)
        before = observed.memory
        fallen = known & (before > 0) & (ratio <= self.factor * before)
        choices = observed.keeping_silent(np.maximum(observed.current - fallen, 0))
        memory = np.where(fallen | (known & (before <= 0)), ratio, before)
        return Decision(choices, memory, f"{int(fallen.sum())} of {len(choices)} layers have more noise")
