"""Momentum and clipping on every rank, before compression (Lin et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from gradcomp.compress.base import Traits, check_momentum_factor
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
        if not isinstance(self.mask, bool):
            raise ConfigError(f"mask must be true or false, got {self.mask!r}")
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
        if (
            isinstance(self.max_norm, bool)
            or not isinstance(self.max_norm, int | float)
            or not 0 < self.max_norm < math.inf
        ):
            raise ConfigError(f"max_norm must be positive and finite, got {self.max_norm!r}")
        if self.inner.traits.clip_norm is not None:
            raise ConfigError(f"{self.inner.name} clips already: clip once")

    @cached_property
    def traits(self) -> Traits:
        return replace(self.inner.traits, clip_norm=self.max_norm)

    def cut_elements(self, layer: LayerSpec) -> int:
        return max(layer.size, 1)
