"""Top-k: the largest elements of every layer."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.messages import Bytes
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import ByDensity, Sparse
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Group
from gradcomp.kernels.step import StepContext


@register("topk")
@dataclass(frozen=True)
class TopK(ByDensity, Sparse):
    """Send the k = round(density n) elements of largest magnitude of each layer, at least one.

    Ties go to the lower index, so that the selection is a function of the values. The level is the density.

    Wire: k values and k coded indices, to all ranks: (N - 1) d bytes per rank for a payload of d bytes; one round. With
    exact values and the default coding a density of 1% costs 40.6 bits an element sent (48 x less than with 32-bit
    indices would be 64 bits).
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1].
    Source: Markov 2024, section 2.2.3 (Top-K); Markov et al. 2024. Selection is per layer, as in both.
    """

    by_kernels = True

    def distortion(self, layer: LayerSpec) -> Distortion:
        """That of the k largest."""
        return self.distortion_of_largest(self.sent_of(layer), layer)

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """The k largest."""
        selection.select_top(
            group.inputs,
            flags,
            context.factors(len(group.table)),
            chosen.counts,
            chosen.offsets,
            chosen.indices,
            chosen.values,
            decay=context.decay,
        )
