"""AdaQS raises the precision of a layer once its gradient is mostly noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.control.base import Doubles
from gradcomp.control.candidates import Candidate, CandidateLevels
from gradcomp.control.checks import checked
from gradcomp.control.levels import keeping_silent
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.two_levels import TwoLevels
from gradcomp.core.errors import ConfigError


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

    factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1:
            raise ConfigError(f"factor must be between 0 and 1, got {factor!r}")
        self.candidates()

    @property
    def start(self) -> Candidate:
        return self.high

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
        choices = keeping_silent(observed, np.maximum(observed.current - fallen, 0))
        memory = np.where(fallen | (known & (before <= 0)), ratio, before)
        return Decision(choices, memory, f"{int(fallen.sum())} of {len(choices)} layers have more noise")
