"""TopK sends the largest elements of every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.messages import Bytes
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import ByDensity, Sparse
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Group
from gradcomp.kernels.step import StepContext


@register("topk")
@dataclass(frozen=True)
class TopK(ByDensity, Sparse):
    """Send the k = round(density n) elements of largest magnitude of each layer, but none that is 0.

    S = the k largest |p|, at least one, without those that are 0. Ties go to the lower index, so that the selection is
    a function of the values. The level is the density.

    ``zeros``: send elements of 0 too, so that there are always k elements. With exact or cast values the mean is the
    same, bit for bit. A payload then has the same size in every step. On a GPU it is encoded in one call; without
    ``zeros`` it takes two, between which the counts are copied to the host. It is decoded in one call.

    Wire: for every layer its count (4 bytes) and min(k, non-zeros) values and coded indices, to all ranks: (N - 1) d
    bytes per rank for a payload of d bytes; one round, or two where it grows. With ``zeros`` there are k elements and
    no count, in one round. With exact values and the default coding a density of 1% costs 40.6 bits per element sent,
    where 32-bit indices would cost 64. ``wire_bytes`` is that of layers with k non-zeros.
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1], and for ``zeros`` that is neither true nor false.
    Source: Markov 2024, section 2.2.3 (Top-K); Markov et al. 2024. Selection is per layer, as in both. Differs: zeros
    are not sent by default.
    """

    by_kernels = in_one_call = True

    zeros: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.zeros, bool):
            raise ConfigError(f"zeros must be true or false, got {self.zeros!r}")

    @property
    def fixed(self) -> bool:
        return self.zeros

    def distortion(self, layer: LayerSpec) -> Distortion:
        return self.distortion_of_largest(self.sent_of(layer), layer)

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        selection.select_top(
            group.inputs,
            flags,
            context.factors(len(group.table)),
            group.scratch.once("limits", lambda: self.limits(group.table)),
            chosen.offsets,
            chosen.indices,
            chosen.values,
            chosen.counts,
            decay=context.decay,
            zeros=self.zeros,
        )
