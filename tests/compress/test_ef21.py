"""Tests EF21: the estimates of each other's gradients that ranks keep, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from compress.selecting import only_largest

import gradcomp as gc
from gradcomp.testing.simulation import Simulation, true_mean

LAYERS = [gc.LayerSpec("matrix", (13, 17)), gc.LayerSpec("bias", (29,))]
every_world = pytest.mark.parametrize("world", [1, 2, 3])

INNER = {
    "topk": gc.TopK(0.1),
    "quantize": gc.Quantize(4, 32, rounding="nearest"),
    "drawn": gc.Quantize(6, 32),
    "one_bit": gc.OneBit(64),
    "random_k": gc.RandomK(0.3),
    "powersgd": gc.PowerSGD(2),
}
every_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)


def field(ranks: Simulation, rank: int, name: str, layer: int) -> np.ndarray:
    return ranks.pipelines[rank].fields[f"ef21_{name}"].value(layer).astype(np.float64)


@every_world
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_steps_are_those_of_the_paper(world: int, momentum: float):
    """v = m v + (1 - m) x; g_i += C(v - g_i); g += mean C(v - g_i), in float64. Some steps are discarded."""
    ranks = Simulation(LAYERS, gc.EF21(gc.TopK(0.4), momentum), world)
    v, own = ([[np.zeros(layer.size) for layer in LAYERS] for _ in range(world)] for _ in range(2))
    mean = [np.zeros(layer.size) for layer in LAYERS]
    for number in range(6):
        gradients = ranks.gradients()
        accepted = number % 3 != 1
        outcome = ranks.step(gradients, commit=accepted)
        for i, layer in enumerate(LAYERS):
            sent, moved = [], []
            for rank in range(world):
                moved.append(momentum * v[rank][i] + (1 - momentum) * gradients[rank][i].astype(np.float64))
                sent.append(only_largest(moved[rank] - own[rank][i], round(0.4 * layer.size)))
            want = mean[i] + sum(sent) / world
            np.testing.assert_allclose(outcome.mean(i), want, rtol=0, atol=1e-5)
            if accepted:
                mean[i] = want
                for rank in range(world):
                    v[rank][i] = moved[rank]
                    own[rank][i] += sent[rank]


@every_world
@every_inner
def test_all_ranks_know_the_mean_of_what_each_is_known_by(inner, world: int):
    """If anything were coded twice, g would not be the mean of the g_i."""
    ranks = Simulation(LAYERS, gc.EF21(inner), world, slice_elements=96, shuffle=True)
    for number in range(5):
        ranks.step(commit=number != 2)
        for layer in range(len(LAYERS)):
            known = np.mean([field(ranks, rank, "own", layer) for rank in range(world)], axis=0)
            for rank in range(world):
                np.testing.assert_allclose(field(ranks, rank, "mean", layer), known, rtol=0, atol=1e-5)


@every_inner
def test_of_gradients_that_stand_still_nothing_is_lost(inner):
    """Under error feedback every step still lacks what it does not send."""

    def errors(compressor: gc.Compressor, steps: int) -> list[float]:
        ranks = Simulation(LAYERS, compressor, 2)
        gradients = ranks.gradients()
        true = [true_mean(gradients, layer) for layer in range(len(LAYERS))]
        means = [ranks.step(gradients).all_means() for _ in range(steps)]
        return [max(float(np.abs(m - t).max()) for m, t in zip(mean, true, strict=True)) for mean in means]

    lost = errors(gc.EF21(inner), 61)
    assert lost[-1] < 0.02 * lost[0]
    assert lost[-1] < 0.1 * min(errors(inner if inner.traits.keeps_residual else gc.ErrorFeedback(inner), 60))


def test_wrappers_go_around():
    ranks = Simulation(LAYERS, gc.Warmup(gc.MomentumCorrection(gc.EF21(gc.TopK(0.2)), 0.5, mask=False), 1), 2)
    for _ in range(3):
        assert all(np.isfinite(mean).all() for mean in ranks.step().all_means())
