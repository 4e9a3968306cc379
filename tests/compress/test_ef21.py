"""EF21: what the ranks know of each other's gradients, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp import (
    EF21,
    ErrorFeedback,
    LayerSpec,
    MomentumCorrection,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
    Warmup,
)
from gradcomp.testing.simulation import Simulation

LAYERS = [LayerSpec("matrix", (13, 17)), LayerSpec("bias", (29,))]
WORLDS = (1, 2, 3)
every_world = pytest.mark.parametrize("world", WORLDS)

INNER = {
    "topk": TopK(0.1),
    "quantize": Quantize(4, 32, rounding="nearest"),
    "drawn": Quantize(6, 32),
    "one_bit": OneBit(64),
    "random_k": RandomK(0.3),
    "powersgd": PowerSGD(2),
}
every_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)


def field(ranks: Simulation, rank: int, name: str, layer: int) -> np.ndarray:
    return ranks.pipelines[rank].fields[f"ef21_{name}"].value(layer).astype(np.float64)


def noisy(center: list[list[np.ndarray]], r: np.random.Generator, size: float):
    return [[g + size * r.standard_normal(g.shape).astype(np.float32) for g in rank] for rank in center]


def centers(world: int, r: np.random.Generator) -> list[list[np.ndarray]]:
    return [[r.standard_normal(layer.size).astype(np.float32) for layer in LAYERS] for _ in range(world)]


def largest(x: np.ndarray, count: int) -> np.ndarray:
    kept = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:count]
    kept[chosen] = x[chosen]
    return kept


@every_world
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_steps_are_those_of_the_paper(world: int, momentum: float):
    """v = m v + (1 - m) x; g_i += C(v - g_i); g += mean C(v - g_i): by the top k, in float64, with a discarded step."""
    r = np.random.default_rng(world)
    ranks, center = Simulation(LAYERS, EF21(TopK(0.4), momentum), world), centers(world, r)
    v, own = ([[np.zeros(layer.size) for layer in LAYERS] for _ in range(world)] for _ in range(2))
    mean = [np.zeros(layer.size) for layer in LAYERS]
    for number in range(6):
        gradients = noisy(center, r, 0.1)
        accepted = number % 3 != 1
        outcome = ranks.step(gradients, commit=accepted)
        for i, layer in enumerate(LAYERS):
            sent, moved = [], []
            for rank in range(world):
                x = gradients[rank][i].reshape(-1).astype(np.float64)
                moved.append(momentum * v[rank][i] + (1 - momentum) * x)
                sent.append(largest(moved[rank] - own[rank][i], round(0.4 * layer.size)))
            want = mean[i] + sum(sent) / world
            np.testing.assert_allclose(outcome.mean(i).reshape(-1), want, rtol=0, atol=1e-5)
            if accepted:
                mean[i] = want
                for rank in range(world):
                    v[rank][i] = moved[rank]
                    own[rank][i] += sent[rank]


@every_world
@every_inner
def test_all_ranks_know_the_mean_of_what_each_is_known_by(inner, world: int):
    """Nothing is coded twice: else g would leave the mean of the g_i."""
    r = np.random.default_rng(7)
    ranks, center = Simulation(LAYERS, EF21(inner), world, slice_elements=96, shuffle=True), centers(world, r)
    for number in range(5):
        ranks.step(noisy(center, r, 0.2), commit=number != 2)
        for layer in range(len(LAYERS)):
            known = np.mean([field(ranks, rank, "own", layer) for rank in range(world)], axis=0)
            for rank in range(world):
                np.testing.assert_allclose(field(ranks, rank, "mean", layer), known, rtol=0, atol=1e-5)


def error(ranks: Simulation, gradients) -> float:
    outcome = ranks.step(gradients)
    true = [np.mean([rank[i] for rank in gradients], axis=0) for i in range(len(LAYERS))]
    return max(float(np.abs(outcome.mean(i) - t).max()) for i, t in enumerate(true))


@every_inner
def test_of_gradients_that_stand_still_nothing_is_lost(inner):
    """What error feedback does not give: with it every step still loses what it does not send."""
    center = centers(2, np.random.default_rng(3))
    ranks = Simulation(LAYERS, EF21(inner), 2)
    first = error(ranks, center)
    errors = [error(ranks, center) for _ in range(60)]
    assert errors[-1] < 0.02 * first
    plain = Simulation(LAYERS, inner if inner.traits.keeps_residual else ErrorFeedback(inner), 2)
    assert errors[-1] < 0.1 * min(error(plain, center) for _ in range(60))


def test_wrappers_go_around():
    r = np.random.default_rng(5)
    ranks = Simulation(LAYERS, Warmup(MomentumCorrection(EF21(TopK(0.2)), 0.5, mask=False), 1), 2)
    for _ in range(3):
        for mean in ranks.step(centers(2, r)).all_means():
            assert np.isfinite(mean).all()
