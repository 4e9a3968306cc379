"""Error feedback, momentum and clipping on every rank, before compression."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gradcomp.compress.base import Compressor, Traits, check_momentum_factor
from gradcomp.compress.bounds import ANY_LAYER, check_feedback_around
from gradcomp.compress.checks import check_flag, check_number, check_positive
from gradcomp.compress.registry import register
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec


@register("momentum_correction")
@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Exchange each rank's momentum instead of its gradient.

    u_t = m u_{t-1} + g_t;  p_t = u_t + e_t;  e_{t+1} = p_t - Q(p_t). An element that waits in the residual keeps
    collecting momentum, as it would if it were sent at once. With ``mask`` (momentum factor masking) u is set to zero
    where a sparse compressor sent an element, so that old momentum does not push it twice.

    The optimizer must not have a momentum of its own, or ``factor`` must be ``"optimizer"``: then m is the momentum of
    the layer's group in the optimizer at the beginning of the step, for SGD without Nesterov's form, and the optimizer
    steps without it. If both have momentum, the step raises ConfigError.

    State: u per layer and rank, 8 bytes per element, without the loss scale; averaged when the number of ranks changes.
    Errors: ConfigError for a momentum outside (0, 1) that is not ``"optimizer"``, and for an ``inner`` with momentum.
    Source: Lin et al. 2018 as used in Abrahamyan et al. 2021, section V-A, and Tyagi and Swany 2023, section IV.
    Differs: no Nesterov form.
    """

    factor: float | str = 0.9
    mask: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum_factor(self.factor, "the momentum factor")
        if not self.factor:
            raise ConfigError("a momentum factor of 0 corrects nothing: leave momentum_correction away")
        check_flag("mask", self.mask)
        if self.inner.traits.momentum:
            raise ConfigError(f"{self.inner.name} has momentum already: apply it once")

    @cached_property
    def traits(self) -> Traits:
        return replace(self.inner.traits, momentum=self.factor, masks_momentum=self.mask)


@register("local_clip")
@dataclass(frozen=True)
class LocalClip(Wrapper):
    """Scale down what each rank adds to the result, per layer, so that its norm is at most ``max_norm`` / sqrt(N).

    s <- min(1, max_norm N^(-1/2) / ||s||_2) s for a rank's share s of the result, before momentum and residual are
    added: s is g / N for a mean and g for a sum. N independent shares of that norm add up to a result of norm
    ``max_norm``.

    State: none. Layers are not cut into slices, because the norm is the whole layer's.
    Errors: ConfigError for a norm that is not positive and finite, and for an ``inner`` that clips already.
    Source: Lin et al. 2018. Differs: the norm is that of each layer instead of the model, so that the exchange need not
    wait for the last gradient.
    """

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("max_norm", self.max_norm)
        if self.inner.traits.clip_norm is not None:
            raise ConfigError(f"{self.inner.name} clips already: clip once")

    @cached_property
    def traits(self) -> Traits:
        return replace(self.inner.traits, clip_norm=self.max_norm)

    def cut_elements(self, layer: LayerSpec) -> int:
        return max(layer.size, 1)


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
        check_number("decay", self.decay, "[0, 1]")
        if not self.inner.traits.accounts:
            raise ConfigError(
                f"{self.inner.name} takes no error feedback: its result is not the mean of what ranks send"
            )
        check_flag("follow_rate", self.follow_rate)
        check_feedback_around(self.inner.to_string(), self.inner.distortion(ANY_LAYER))

    def dense(self, exact: Compressor) -> Compressor:
        """Return the exact compressor without feedback, because it loses nothing."""
        return self.inner.dense(exact)

    @cached_property
    def traits(self) -> Traits:
        return replace(
            self.inner.traits, keeps_residual=True, residual_decay=self.decay, follows_rate=self.follow_rate
        )
