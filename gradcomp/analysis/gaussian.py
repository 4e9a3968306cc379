"""Gaussian pairs, whose mutual information is known."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError

Floats = npt.NDArray[np.float64]


def gaussian_information(correlation: float) -> float:
    """Returns the mutual information of two Gaussian variables in bits, I = - log2(1 - rho^2) / 2.

    It is infinite for rho of 1 or -1, NaN for NaN. Binned variables share less, and approach it with narrower bins.
    Raises ConfigError if the correlation is not in -1 .. 1.
    """
    if math.isnan(correlation):
        return correlation
    if not -1 <= correlation <= 1:
        raise ConfigError(f"a correlation must be in -1 .. 1, got {correlation!r}")
    return math.inf if abs(correlation) == 1 else max(0.0, -math.log2(1 - correlation**2) / 2)


def correlation_for(bits: float) -> float:
    """Returns the positive correlation at which :func:`gaussian_information` is ``bits``: sqrt(1 - 2^(-2 I))."""
    return bits if math.isnan(bits) else math.sqrt(max(0.0, 1 - 2 ** (-2 * bits)))


def gaussian_pair(correlation: float, elements: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Draws ``elements`` values of two standard Gaussian variables with this correlation."""
    if not -1 <= correlation <= 1:
        raise ConfigError(f"a correlation must be in -1 .. 1, got {correlation!r}")
    x, noise = np.random.default_rng(seed).standard_normal((2, elements))
    return x, correlation * x + math.sqrt(1 - correlation**2) * noise
