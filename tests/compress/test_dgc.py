"""Deep Gradient Compression: its sample, its momentum and clipping, and its warm-up."""

from __future__ import annotations

import numpy as np
import pytest
from compress.selecting import only_largest, select

from gradcomp import DGC, Identity, LayerSpec, LocalClip, MomentumCorrection, Policy
from gradcomp.testing.simulation import Simulation

SIZE = 400_000


def test_sampled_thresholds_select_about_k_elements():
    layer = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    counts = [len(select(DGC(0.01), layer, step=step).indices[0]) for step in range(12)]
    k = 0.01 * SIZE
    assert all(0.6 * k <= count <= k for count in counts)  # 40 sampled elements above: a deviation of 16%
    assert max(counts) == k, "more than k reached a threshold, and the k largest were selected"
    assert len(set(counts)) > 3, "every step samples other elements"


def test_a_whole_sample_is_exact():
    layer = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    assert len(select(DGC(0.01, sample=1.0), layer).indices[0]) == 0.01 * SIZE


def one_rank(g, u, e, factor, clip, world, compressor):
    """Returns what is sent, the new u and the new e by the equations in DGC's docstring, with an exact selection."""
    if clip is not None:
        norm = np.sqrt(np.square(g.astype(np.float64)).sum()) / world
        g = g * np.float32(min(1, clip / np.sqrt(world) / norm))
    u = g + np.float32(factor) * u
    p = u + e
    sent = only_largest(p, max(1, round(compressor.density * len(g))))
    return sent, np.where(compressor.mask & (sent != 0), 0, u), p - sent


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "compressor",
    [
        DGC(0.1, momentum_factor=0.0),
        DGC(0.1),
        DGC(0.1, momentum_factor=0.5, mask=False),
        DGC(0.1, clip=0.5),
        DGC(0.1, momentum_factor=0.0, clip=2.0),
    ],
    ids=DGC.to_string,
)
def test_steps_are_those_of_the_equations(compressor: DGC, world: int):
    ranks = Simulation([LayerSpec("w", (60,))], compressor, world)
    state = [(np.zeros(60, np.float32), np.zeros(60, np.float32)) for _ in range(world)]
    for _ in range(6):
        gradients = ranks.gradients()
        mean = ranks.step(gradients).mean(0)
        steps = [
            one_rank(rank[0], *state[i], compressor.traits.momentum, compressor.clip, world, compressor)
            for i, rank in enumerate(gradients)
        ]
        state = [(u, e) for _, u, e in steps]
        np.testing.assert_allclose(mean, sum(sent for sent, _, _ in steps) / world, rtol=1e-5, atol=1e-7)


def test_without_momentum_none_is_kept():
    layer = LayerSpec("w", (5,))
    assert DGC(momentum_factor=0.0).fields(layer, 0) == {}
    assert [size for size, _ in DGC().fields(layer, 0).values()] == [5]
    assert not DGC(momentum_factor=0.0, mask=True).traits.masks_momentum, (
        "what is read then is the gradient itself"
    )


def test_dense_keeps_momentum_and_clipping():
    assert DGC(momentum_factor=0.0).dense(Identity()) == Identity()
    assert DGC().dense(Identity()) == MomentumCorrection(Identity(), 0.9)
    assert DGC(momentum_factor=0.5, mask=False, clip=3).dense(Identity()) == LocalClip(
        MomentumCorrection(Identity(), 0.5, mask=False), 3
    )


@pytest.mark.parametrize(
    ("compressor", "changes", "densities"),
    [
        (DGC(0.001, clip=1.0, warmup_steps=40), (10, 20, 30, 40), [0.25, 0.0625, 0.015625, 0.004, 0.001]),
        (DGC(0.05, warmup_steps=7), (3, 6), [0.25, 0.0625, 0.05]),
        (DGC(0.25, warmup_steps=10), (), [0.25]),
        (DGC(0.001), (), [0.001]),
    ],
    ids=["five", "three", "dense", "none"],
)
def test_warm_up_goes_through_the_densities_above_the_final_one_in_equal_parts(
    compressor, changes, densities
):
    assert compressor.changes == changes
    for step in range(60):
        density = densities[sum(step >= change for change in changes)]
        assert compressor.at_step(step) == DGC(density, clip=compressor.clip)


def test_plans_hold_the_densities_of_the_warm_up():
    layers = [LayerSpec("w", (50, 100))]
    policy = Policy(DGC(0.01, warmup_steps=6))
    schedule = policy.scheduled(layers)
    assert schedule is not None
    plans = [policy.plan(layers), *(schedule(step, 1) for step in (2, 4, 6))]
    assert [plan.assignments[0].level for plan in plans] == [0.25, 0.0625, 0.015625, 0.01]
