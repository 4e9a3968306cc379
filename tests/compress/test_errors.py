"""What layers lose under every compressor: against brute force, in all ways of measuring, and with little memory."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Simulation

from gradcomp import (
    Codebook,
    LayerSpec,
    TopK,
)
from gradcomp.compress.budget import Budget
from gradcomp.compress.errors import errors
from gradcomp.compress.low_rank import matrix_shape
from gradcomp.compress.registry import BUILT_IN
from gradcomp.compress.wrapper import Wrapper

SEED = 7
FREE = Budget(None, "a test")
LAYERS = {
    "convolution": LayerSpec("conv", (24, 10, 3, 3)),
    "matrix": LayerSpec("fc", (60, 130)),
    "tall": LayerSpec("embedding", (300, 20)),
    "vector": LayerSpec("bias", (77,)),
    "small": LayerSpec("head", (2, 3)),
    "one": LayerSpec("scale", (1,)),
}


def gradient(layer: LayerSpec, seed: int = 0, decay: float = 0.8) -> np.ndarray:
    """Singular values that fall by ``decay``, and some noise."""
    rng = np.random.default_rng(seed)
    n, m = matrix_shape(layer.shape)
    k = min(n, m)
    left, right = rng.standard_normal((n, k)), rng.standard_normal((k, m))
    return (left * decay ** np.arange(k) @ right).astype(np.float32).reshape(layer.shape)


def one_rank(compressor, layer: LayerSpec, values: np.ndarray) -> np.ndarray:
    """The mean of one rank, by way of the pipeline itself."""
    ranks = Simulation([layer], compressor, world=1, seed=SEED)
    return ranks.step([[values.reshape(-1)]]).mean(0)


def norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def lost(layer: LayerSpec, values: np.ndarray, *choices, **settings) -> list[float]:
    return errors(choices, layer, values, SEED, **settings).tolist()


def one_of_each():
    """Every built-in compressor with its default arguments."""
    for kind in BUILT_IN:
        if issubclass(kind, Wrapper):
            yield kind(TopK(0.1))
        else:
            yield Codebook((0.25, 1)) if kind is Codebook else kind()


# --- every compressor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_every_compressor_has_a_finite_error(layer):
    found = errors(list(one_of_each()), layer, gradient(layer), SEED)
    assert found.shape == (len(BUILT_IN),)
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    assert (found >= 0).all()


def test_print():
    pass
