"""Jobs under LGC: a model with ends, a norm and a bias, and what its ranks have learned."""

from __future__ import annotations

import numpy as np
from compress.selecting import largest  # noqa: F401 - tests of LGC import it from here

from gradcomp import LGC, Compressor, Filter, LayerSpec, Policy
from gradcomp.exchange.snapshot import restore, snapshot
from gradcomp.testing.simulation import Simulation, same_bytes

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


def job(compressor: Compressor = SMALL, world: int = 2, layers=LAYERS, **settings) -> Simulation:
    return Simulation(layers, Policy(compressor, filter=FILTER), world, **settings)


def without_momentum(**settings) -> LGC:
    return LGC(0.01, 0.0, **{"warmup_steps": 0, "train_steps": 3, "least_parameters": 0, **settings})


def nets_of(ranks: Simulation) -> np.ndarray:
    """Returns the weights, the loss and the deconvolutions of the nets, which must be the same on all ranks."""
    found = []
    for pipeline in ranks.pipelines:
        (name,) = (name for name in pipeline.fields.names if "lgc" in name)
        found.append(pipeline.fields[name].value(pipeline.fields.holder(name)).copy())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    return found[0]


def weights_of(ranks: Simulation) -> np.ndarray:
    return nets_of(ranks)[:-2]


def check_resumed(compressor: Compressor, stop: int) -> None:
    """A run that is saved after ``stop`` steps and resumed continues bit for bit as one that is not."""
    straight, first, again = (job(compressor, shuffle=True) for _ in range(3))
    for _ in range(stop):
        first.step()
    again.drawn = first.drawn
    for old, new in zip(first.pipelines, again.pipelines, strict=True):
        restore(new, snapshot(old))
    for step in range(9):
        want = straight.step().all_means()
        if step >= stop:
            assert all(map(same_bytes, again.step().all_means(), want))
    assert again.state() == straight.state()


def owe_nothing(ranks: Simulation) -> None:
    """Sets the residuals of the layers under selection to zero."""
    for pipeline in ranks.pipelines:
        for layer in SENT:
            pipeline.residuals.first.set(layer, np.zeros(LAYERS[layer].size, np.float32))


def support(mean: np.ndarray) -> np.ndarray:
    return np.flatnonzero(mean)
