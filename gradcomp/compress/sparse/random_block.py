"""RandomBlock sends neighbouring elements of every layer, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.drawn import Drawn, Indices
from gradcomp.compress.sparse.random_indices import random_blocks
from gradcomp.compress.sparse.summed import Floats
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Draw, Table


@register("random_block")
@dataclass(frozen=True)
class RandomBlock(Drawn):
    """Send a block of k = round(density n) consecutive elements of each layer, at least one, the same on all ranks.

    The first element is drawn from the shared seed, uniform in 0..n - 1; a block that reaches the end of the layer
    continues at its beginning. By default the selection is biased and has error feedback; with ``scaled`` every element
    is sent as (n / k) p, which is unbiased and has no residual. The level is the density.

    At most two contiguous parts of a layer are read, so this is the cheapest way to send few elements. It also trains
    worst (Vogels et al. 2019, Table 4: 87.8% where Random K reaches 92.6%), because all elements of a block wait
    equally long.

    Wire: one Sum of k values, 8k (N - 1) / N bytes per rank with a ring; no indices.
    State: a residual per layer, unless ``scaled``.
    Errors: ConfigError for a density outside (0, 1], or for ``scaled`` with ``feedback``.
    Source: Vogels et al. 2019, Table 4 and Figure 1 (Random Block). Differs: blocks wrap around, so that every element
    has the same probability k / n of being sent.
    """

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Return 1 - k/n as the bound, or the variance n/k - 1 if ``scaled``."""
        share = self.sent_of(layer) / max(layer.size, 1)
        if not share:
            return Distortion(0.0, self.scaled)
        return Distortion(1.0 / share - 1.0, True) if self.scaled else Distortion(1.0 - share)

    def draw(self, table: Table, draw: Draw) -> Indices:
        """Draw one block of each layer."""
        lengths = table["length"].astype(np.int64)
        return random_blocks(lengths, self.limits(table), table["layer"], draw.seed, draw.step)[1]

    def weights(self, table: Table) -> Floats:
        """Return n / k for all elements of a layer."""
        counts = self.limits(table)
        shares = table["length"].astype(np.float64) / np.maximum(counts, 1)
        return np.repeat(shares.astype(np.float32), counts)
