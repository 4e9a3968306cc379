"""ErrorFeedback adds what was lost in one step to the gradient of the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gradcomp.compress.base import Compressor, Traits
from gradcomp.compress.bounds import ANY_LAYER, check_feedback_around
from gradcomp.compress.registry import register
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError


@register("error_feedback")
@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Give ``inner`` a residual, or change how it reads the one that it has.

    p_t = g_t + a_t e_t;  c_t = Q(p_t);  e_{t+1} = p_t - c_t;  a_t = ``decay``, times gamma_{t-1} / gamma_t with
    ``follow_rate``: residuals are in units of 1 / learning rate, so what was kept back at one learning rate is worth
    more at a lower one (Zheng et al. 2019, as Abrahamyan et al. 2021 cite it). The learning rate is that of the
    optimizer's first group.

    Biased compressors have feedback by default. Wrap the others, or wrap to set ``decay`` or ``follow_rate``.
    State: a residual per layer, 8 bytes per element; with a decay below 1 it no longer holds all that was lost.
    Errors: ConfigError for a decay outside [0, 1], for an ``inner`` whose result is not a mean (a vote), and for one
    whose residual would grow (see :class:`~gradcomp.compress.bounds.Distortion`).
    Source: Markov 2024, Algorithm 2.1; Vogels et al. 2019, Algorithm 2.
    """

    decay: float = 1.0
    follow_rate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.decay, int | float) and not isinstance(self.decay, bool)
        if not number or not 0.0 <= self.decay <= 1.0:
            raise ConfigError(f"decay must be in [0, 1], got {self.decay!r}")
        if not self.inner.traits.accounts:
            raise ConfigError(
                f"{self.inner.name} takes no error feedback: its result is not the mean of what ranks send"
            )
        if not isinstance(self.follow_rate, bool):
            raise ConfigError(f"follow_rate must be true or false, got {self.follow_rate!r}")
        check_feedback_around(self.inner.to_string(), self.inner.distortion(ANY_LAYER))

    def dense(self, exact: Compressor) -> Compressor:
        """Return the exact compressor without feedback, because it loses nothing."""
        return self.inner.dense(exact)

    @cached_property
    def traits(self) -> Traits:
        return replace(
            self.inner.traits,
            keeps_residual=True,
            residual_decay=self.decay,
            follows_rate=self.follow_rate,
        )
