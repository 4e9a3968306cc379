"""SpectralAtomo draws singular triplets by their importance (Wang et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.bounds import Distortion
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.compress.lowrank.spectral import Booleans, Doubles, Spectral
from gradcomp.compress.registry import register
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels import philox
from gradcomp.kernels.codec import Draw


@register("spectral_atomo")
@dataclass(frozen=True)
class SpectralAtomo(Spectral):
    """Send each of a layer's singular triplets with a probability, ``rank`` of them in expectation.

    With M = scale g on every rank, an n x m matrix, and its singular value decomposition M = sum of s_i u_i v_i^T:

        p_i = min(1, c s_i), with c such that their sum is r;  b_i = 1 with probability p_i, else 0
        mean = (1/N) sum over ranks of the sum of b_i (s_i / p_i) u_i v_i^T

    which is M's mean in expectation, with the least variance that independent draws of r atoms can have. This is a
    baseline: to decompose in every step is too slow for anything else (Vogels et al. 2019, Table 6: 948 ms per batch,
    where SGD takes 312 and PowerSGD 239). The first dimension of a tensor is n, all others together are m. Layers for
    which r (n + m) >= n m, vectors among them, travel exactly. The level is the rank, at most min(n, m).

    Wire: 4 + 4 k (n + m) bytes per layer, with k atoms, r in expectation and min(n, m) at most, to all ranks: (N - 1) d
    bytes per rank. One round, or two where payloads grow. s_i / p_i is part of the vectors.
    State: none.
    Errors: ConfigError for a rank below 1; WireFormatError for counts and lengths that cannot be;
    numpy.linalg.LinAlgError if LAPACK does not converge.
    Source: Wang et al. 2018 (ATOMO), as Vogels et al. 2019 describe it in section 2 and measure it in Table 6.
    Differs: layers are reshaped as for PowerSGD. Draws have 32 bits: a p_i below 2^-33 is 0.
    """

    fixed: ClassVar[bool] = False

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the variance: sum of s_i^2 (1 / p_i - 1) <= (sum of s_i)^2 / r - ||M||^2.

        That is at most (min(n, m) / r - 1) ||M||^2.
        """
        rank = clamped_rank(layer.shape, self.rank)
        return Distortion(min(matrix_shape(layer.shape)) / rank - 1.0 if rank else 0.0, True)

    def most_atoms(self, n: int, m: int, rank: int) -> int:
        return min(n, m)

    def choose(
        self, sigma: Doubles, rank: int, hashes: npt.NDArray[np.uint32], draw: Draw
    ) -> tuple[Booleans, Doubles]:
        """Choose every atom by a draw of its own."""
        likely = probabilities(sigma, rank)
        chosen = draws(hashes, sigma.shape[1], draw) < likely
        return chosen, np.divide(sigma, likely, out=np.zeros_like(sigma), where=chosen)


def probabilities(sigma: Doubles, rank: int) -> Doubles:
    """Return min(1, c sigma), which sums to ``rank``, or to the number of positive values if there are fewer.

    Args:
        sigma: float64, shape (matrices, values); each row not negative, in descending order.
        rank: 1 to the number of values.

    Returns:
        float64 of the same shape.
    """
    tails = np.cumsum(sigma[:, ::-1], axis=1)[:, ::-1]
    left = rank - np.arange(sigma.shape[1])
    # The first value whose fair share of the remaining sum is at most 1; those before it have probability 1.
    first = (sigma * left <= tails).argmax(axis=1)[:, None]
    tail = np.take_along_axis(tails, first, axis=1)
    share = sigma * (rank - first)
    fair = np.divide(share, tail, out=np.zeros_like(sigma), where=tail > 0)
    return np.where(np.arange(sigma.shape[1]) < first, 1.0, fair)


def draws(hashes: npt.NDArray[np.uint32], count: int, draw: Draw) -> Doubles:
    """Draw ``count`` numbers in (0, 1) for each layer.

    They are word i % 4 of the Philox counter (2**32 - 1 - i // 4, layer, step, rank). Draws for the elements of a layer
    count up from 0 and do not reach these; draws of a shared random factor have the owner's number in place of a rank
    (see `lowrank.random_q`).
    """
    blocks = -(-count // 4)
    counter = np.empty((len(hashes), blocks, 4), dtype=np.uint32)
    counter[..., 0] = 0xFFFFFFFF - np.arange(blocks)
    counter[..., 1] = hashes[:, None]
    counter[..., 2:] = draw.step, draw.rank
    words = philox.philox4x32(counter, (draw.seed & 0xFFFFFFFF, draw.seed >> 32))
    numbers = words.reshape(len(hashes), 4 * blocks)[:, :count].astype(np.float64)
    return (numbers + 0.5) * 2.0**-32
