"""More precision as soon as gradients are mostly noise."""

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
    """In the style of AdaQS: a layer's precision rises when the mean of its gradient falls against the deviation.

    Of a layer's gradient added up over a period, with mean μ and standard deviation σ over its elements,

        m = |μ| / σ

    Layers begin at ``high`` compression, and the first m > 0 of a layer is remembered as m_0. Whenever m <= factor m_0,
    the layer goes one step towards ``low``, and m_0 = m; if that is 0, the next m > 0 takes its place. Steps double the
    level: high, 2 high, 4 high, ..., low; between compressors there is one step. Precision never falls again. A layer
    without a gradient, or whose elements are all equal (σ = 0), keeps its choice and its m_0.

    Args:
        low: level of low compression, such as 8 bits, or a compressor or its string form.
        high: of high compression, such as 2 bits. Both are levels, or both are compressors.
        factor: how far m must fall, between 0 and 1.
        every_steps: steps in a period.
        window: add up only the last so many steps of it; by default all of them.
        samples: measure so many single steps of it instead; see :class:`Periodic`.
        memory_bytes: cap on what is held for sums, on every rank.

    Wire: twice a period a sum over ranks of float64, 4 numbers and then 2 per layer.

    State: one ratio per layer, the same on all ranks; the sums of :class:`Periodic`.

    Raises:
        ConfigError: ``low`` and ``high`` are the same, impossible, or the wrong way round; factor is not in (0, 1).

    Source: the idea of Guo et al., Accelerating distributed deep learning by adaptive gradient quantization (2020), as
    others tell it: Markov 2024 and Tyagi and Swany 2023 (section II-C). Its text was not at hand, so the rule
    is ours where these leave it open: per layer, where theirs is for the whole model; exact moments instead of
    estimated ones.
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
        """High compression."""
        return self.high

    def candidates(self) -> list[Candidate]:
        """From ``low`` to ``high``: levels that double."""
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
        """No ratio yet."""
        return np.zeros(len(candidates.layers))

    def decide(self, observed: PeriodObservations) -> Decision:
        """One step towards ``low`` for layers whose ratio has fallen."""
        known = ~observed.silent & (observed.deviation > 0)
        ratio = np.divide(np.abs(observed.mean), observed.deviation, out=np.zeros(len(known)), where=known)
        before = observed.memory
        fallen = known & (before > 0) & (ratio <= self.factor * before)
        choices = keeping_silent(observed, np.maximum(observed.current - fallen, 0))
        memory = np.where(fallen | (known & (before <= 0)), ratio, before)
        return Decision(choices, memory, f"{int(fallen.sum())} of {len(choices)} layers have more noise")
