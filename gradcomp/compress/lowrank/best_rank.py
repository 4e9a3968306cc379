"""BestRank sends the best approximation at a given rank, by singular value decomposition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.compress.lowrank.spectral import Booleans, Doubles, Spectral
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Draw


@register("best_rank")
@dataclass(frozen=True)
class BestRank(Spectral):
    """Send each layer's ``rank`` largest singular values with their vectors.

    With M = scale g + decay e on every rank, an n x m matrix, and its singular value decomposition M = U S V^T:

        C = U_r S_r V_r^T;  mean = (1/N) sum over ranks of C;  e' = M - C

    This is a baseline that shows what PowerSGD loses by its single step of iteration. To decompose in every step is too
    slow for anything else: 673 ms where a whole step with PowerSGD takes 105 (Vogels et al. 2019, section 4.2). The
    first dimension of a tensor is n, all others together are m. Layers for which r (n + m) >= n m, vectors among them,
    travel exactly. The level is the rank, at most min(n, m). ``feedback=False``: there is no e.

    Wire: r (n + m) floats, sqrt(S_r) in both factors, to all ranks: (N - 1) d bytes per rank; one round.
    State: a residual per layer.
    Errors: ConfigError for a rank below 1; numpy.linalg.LinAlgError if LAPACK does not converge.
    Source: Vogels et al. 2019, Table 2 ("best approximation"). The paper does not say whether it approximates each
    worker's matrix or their mean, which would need a dense exchange. Here each rank's matrix is approximated, so the
    mean has a rank of up to N r where PowerSGD's has r; with one rank they are the same.
    """

    fixed: ClassVar[bool] = True

    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.feedback, bool):
            raise ConfigError(f"feedback must be true or false, got {self.feedback!r}")

    @cached_property
    def traits(self) -> Traits:
        """Return a residual by default, because a truncation is biased."""
        return Traits(keeps_residual=self.feedback)

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the loss: the r largest of min(n, m) singular values hold at least r / min(n, m) of the energy."""
        rank = clamped_rank(layer.shape, self.rank)
        return Distortion(1.0 - rank / min(matrix_shape(layer.shape)) if rank else 0.0)

    def most_atoms(self, n: int, m: int, rank: int) -> int:
        return rank

    def choose(
        self, sigma: Doubles, rank: int, hashes: npt.NDArray[np.uint32], draw: Draw
    ) -> tuple[Booleans, Doubles]:
        """Choose the first ``rank`` atoms, weighted by their singular values."""
        return np.broadcast_to(np.arange(sigma.shape[1]) < rank, sigma.shape), sigma
