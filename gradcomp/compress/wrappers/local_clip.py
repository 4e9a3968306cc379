"""Local clipping: every rank clips its own gradient before it adds anything to it (Deep Gradient Compression)."""

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

    s <- min(1, max_norm N^(-1/2) / ||s||_2) s for a rank's share s of the result: g / N of a mean, g of a sum, before
    momentum and residual are added. N independent shares of that norm add up to a result of norm ``max_norm``.

    State: none. Layers are not cut into slices: the norm is the whole layer's.
    Source: DGC (Lin et al. 2018). Differs: the norm of each layer instead of that of the model, so that the exchange
    need not wait for the last gradient.
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
            raise ConfigError(f"{self.inner.name} clips already")

    @cached_property
    def traits(self) -> Traits:
        """The inner one's, with clipping."""
        return replace(self.inner.traits, clip_norm=self.max_norm)

    def cut_elements(self, layer: LayerSpec) -> int:
        """The whole layer."""
        return max(layer.size, 1)
