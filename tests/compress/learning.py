"""Jobs under LGC: a model with ends, a norm and a bias, and what its ranks have learned."""

from __future__ import annotations

import numpy as np

from gradcomp import LGC, Filter, LayerSpec, Policy
from gradcomp.testing.simulation import Simulation

# In the order of a model: the norm and the bias are excluded by the filter.
LAYERS = [
    LayerSpec("first", (16, 3, 3, 3)),
    LayerSpec("a", (40, 50)),
    LayerSpec("norm", (64,), kind="norm"),
    LayerSpec("b", (30, 100)),
    LayerSpec("last", (20, 60)),
    LayerSpec("bias", (10,), kind="bias"),
]
FIRST, A, NORM, B, LAST, BIAS = range(6)
SENT = {A: 20, B: 30, LAST: 12}
SMALL = LGC(0.01, warmup_steps=2, train_steps=3, least_parameters=0)
FILTER = Filter(min_elements=100)


def job(compressor: LGC = SMALL, world: int = 2, layers=LAYERS, **settings) -> Simulation:
    return Simulation(layers, Policy(compressor, filter=FILTER), world, **settings)


def without_momentum(**settings) -> LGC:
    return LGC(0.01, 0.0, **{"warmup_steps": 0, "train_steps": 3, "least_parameters": 0, **settings})


def nets_of(ranks: Simulation) -> np.ndarray:
    """The weights of all ranks, which are the same, and the loss of their training."""
    found = []
    for pipeline in ranks.pipelines:
        (name,) = (name for name in pipeline.fields.names if "lgc" in name)
        found.append(pipeline.fields[name].value(pipeline.fields.holder(name)).copy())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    return found[0]


def weights_of(ranks: Simulation) -> np.ndarray:
    return nets_of(ranks)[:-1]


def owe_nothing(ranks: Simulation) -> None:
    """Set the residuals of what is selected to zero."""
    for pipeline in ranks.pipelines:
        for layer in SENT:
            pipeline.residuals.first.set(layer, np.zeros(LAYERS[layer].size, np.float32))


def support(mean: np.ndarray) -> np.ndarray:
    return np.flatnonzero(mean)


def largest(gradient: np.ndarray, count: int) -> np.ndarray:
    """The indices of so many elements, ascending."""
    return np.sort(np.argsort(-np.abs(gradient), kind="stable")[:count])
