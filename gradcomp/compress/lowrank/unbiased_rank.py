"""UnbiasedRank projects on random directions that all ranks share (Vogels et al. 2019, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradcomp import kernels
from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.lowrank.base import LowRank, Matrices, clamped_rank, elements, matrix_shape
from gradcomp.compress.messages import Bytes, Exchange, Floats, Sum
from gradcomp.compress.registry import register
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels import lowrank
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext


@register("unbiased_rank")
@dataclass(frozen=True)
class UnbiasedRank(LowRank):
    """Send the product of each layer's matrix with ``rank`` random directions, which are drawn anew in every step.

    M = scale g is a rank's n x m matrix. U is m x r, with normal entries of variance 1 / r, so that E[U U^T] = I:

        P = sum over ranks of M U;  mean = P U^T / N

    This is a baseline: its test accuracy is 71 to 76%, that of PowerSGD 94% (Vogels et al. 2019, Table 1). The expected
    error is 0, so no residual is kept. The norm of the error is about sqrt(m / r) times that of M, so ErrorFeedback is
    refused.

    n is the first dimension of a tensor, and m the product of the others. Layers for which r (n + m) >= n m, vectors
    among them, travel exactly. The level is the rank, at most min(n, m).

    Wire: r n floats per layer in one Sum, which sends 2 d (N-1)/N bytes per rank with a ring, for d = 4 r n. Every rank
    draws U from the seed.
    State: none.
    Errors: ConfigError for a rank that is not a whole number in 1 .. 2**15 - 1.
    Source: Vogels et al. 2019, section 4.1 and Table 1. The paper leaves the distribution of U open; here it is normal.
    """

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Return the variance: E||x (U U^T - I)||^2 = ||x||^2 (m + 1) / r for every row x."""
        rank = clamped_rank(layer.shape, self.rank)
        return Distortion((matrix_shape(layer.shape)[1] + 1) / rank if rank else 0.0, True)

    @cached_property
    def traits(self) -> Traits:
        return Traits(contributes=True)

    def wire_bytes(self, group: Group) -> Sizes:
        return 4 * elements(group, lambda n, m, r: r * n)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        matrices = group.scratch.once("matrices", lambda: Matrices.of(group))
        u = _directions(group, context, matrices)
        own = group.scratch.array("own", matrices.p_size)

        def write(view: Floats) -> Bytes:
            low, exact = matrices.split(np.zeros(len(group.table), dtype=np.uint8))
            rest = view[matrices.p_size :]
            table = group.inputs[matrices.low]
            with kernels.together(group.device) as started:
                matrices.project(table, context, matrices.q(u), view[: matrices.p_size], low)
                matrices.write_exact(group, context, rest, exact)
            started.finish()
            own[:] = view[: matrices.p_size]
            flags = matrices.join(low, exact)
            matrices.spoil(rest, flags)
            return flags

        reply = yield Sum(matrices.p_size + matrices.exact_size, write)
        low, exact = matrices.split(reply.flags)
        p, table = reply.data[: matrices.p_size], group.inputs[matrices.low]
        with kernels.together(group.device) as started:
            matrices.read_exact(group, context, reply.data[matrices.p_size :], exact)
            if group.feedback:
                lowrank.subtract(table, matrices.shapes, matrices.p(own), matrices.q(u))
            matrices.expand(group, context, p, u, low)
        started.finish()
        return matrices.join(low, exact)


def _directions(group: Group, context: StepContext, matrices: Matrices) -> Floats:
    """Return U of every approximated layer, bit-identical on all ranks."""
    hashes = group.table["layer"][matrices.low]
    seed, step = context.draw.seed, context.draw.step
    normal = lowrank.random_factors(matrices.columns, matrices.ranks, hashes, seed=seed, step=step)
    roots = np.sqrt(matrices.ranks).astype(np.float32)
    scaled: Floats = normal / np.repeat(roots, matrices.ranks * matrices.columns)
    return scaled
