"""LocalClip clips every rank's own gradient before anything is added to it (Lin et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from gradcomp.compress.base import Traits
from gradcomp.compress.registry import register
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec


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
