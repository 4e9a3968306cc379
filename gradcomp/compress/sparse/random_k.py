"""RandomK sends random elements of every layer, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.drawn import Drawn, Indices
from gradcomp.compress.sparse.random_indices import random_indices
from gradcomp.compress.sparse.summed import Floats
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Draw, Sizes, Table
from gradcomp.kernels.draws import strata


@register("random_k")
@dataclass(frozen=True)
class RandomK(Drawn):
    """Send k = round(density n) random elements of each layer, at least one, the same on all ranks.

    Stratum j of k is [floor(j n / k), floor((j + 1) n / k)); one element of each is drawn. By default the selection is
    biased and has error feedback; with ``scaled`` an element from a stratum of s is sent as s p, which is unbiased and
    has no residual. The level is the density.

    Wire: one Sum of k values, 8k (N - 1) / N bytes per rank with a ring; no indices, since all ranks draw them from the
    shared seed.
    State: a residual per layer, unless ``scaled``.
    Errors: ConfigError for a density outside (0, 1], or for ``scaled`` with ``feedback``.
    Source: Tyagi and Swany 2023 (Random-k); Vogels et al. 2019, Table 4 (Random K); Markov 2024, section 2.2.3
    (rand-K). Differs: draws are stratified, where an unstructured random subset may leave long stretches out. An
    element has the same probability of being sent (k / n, up to the rounding of strata), sums have less variance, and
    indices are ascending and distinct by construction.
    """

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the loss by the largest stratum, of s elements: 1 - 1/s, or the variance s - 1 if ``scaled``."""
        stratum = -(-layer.size // max(self.sent_of(layer), 1))
        if self.scaled:
            return Distortion(max(stratum - 1.0, 0.0), True)
        return Distortion(1.0 - 1.0 / max(stratum, 1))

    def draw(self, table: Table, draw: Draw) -> Indices:
        """Draw one index in each stratum."""
        return random_indices(_lengths(table), self.limits(table), table["layer"], draw.seed, draw.step)[1]

    def weights(self, table: Table) -> Floats:
        """Return the size of the stratum of every element."""
        return strata(_lengths(table), self.limits(table))[1].astype(np.float32)


def _lengths(table: Table) -> Sizes:
    lengths: Sizes = table["length"].astype(np.int64)
    return lengths
