"""Tests in exact numbers what wrappers do to gradients, residuals and momentum."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp import ErrorFeedback, Identity, LayerSpec, LocalClip, MomentumCorrection, Quantize, TopK
from gradcomp.compress.base import MOMENTUM
from gradcomp.exchange.snapshot import restore, snapshot
from gradcomp.testing.simulation import DTYPES, Simulation, plan_for, same_bytes

FOUR = [LayerSpec("w", (4,))]
ONE_OF_FOUR = TopK(0.25)


def step(ranks: Simulation, *gradients, scale: float = 1.0, **options) -> list[float]:
    """Returns the mean of the only layer, without loss scale. ``gradients`` has one for each rank, or one for all."""
    dtype = DTYPES[ranks.layers[0].dtype]
    each = gradients * (ranks.size // len(gradients))
    scaled = [[None if g is None else (np.array(g) * scale).astype(dtype)] for g in each]
    return (ranks.step(scaled, scale=scale, **options).mean(0).astype(np.float64) / scale).tolist()


def residual(ranks: Simulation, rank: int = 0) -> list[float]:
    return ranks.pipelines[rank].residuals.first.value(0).tolist()


def momentum(ranks: Simulation, rank: int = 0) -> list[float]:
    return ranks.pipelines[rank].fields[MOMENTUM].value(0).tolist()


# --- error feedback -----------------------------------------------------------------------------------------


def test_residuals_decay_when_they_are_read():
    ranks = Simulation(FOUR, ErrorFeedback(ONE_OF_FOUR, decay=0.5), 1)
    assert step(ranks, [4, 2, 1, 0]) == [4, 0, 0, 0]
    assert residual(ranks) == [0, 2, 1, 0]
    assert step(ranks, [0, 1, 0, 0]) == [0, 2, 0, 0]
    assert residual(ranks) == [0, 0, 0.5, 0]


def at_rates(ranks: Simulation, rates, *, commit: bool = True) -> list[list[float]]:
    means = []
    for rate in rates:
        ranks.rate = rate
        means.append(step(ranks, [0, 1, 0, 0] if ranks.pipelines[0].step else [4, 2, 1, 0], commit=commit))
    return means


@pytest.mark.parametrize(
    ("decay", "rates", "second"),
    [(1, (0.5, 0.25), 5), (1, (0.25, 0.5), 2), (1, (0.5, 0.0), 3), (1, (0.0, 0.5), 3), (1, (0.5, 0.5), 3),
     (0.5, (0.5, 0.125), 5)],
)  # fmt: skip
def test_residuals_follow_the_learning_rate(decay: float, rates, second: float):
    """The mean is 1 + 2 decay (last rate / this rate). A rate of 0 is unknown."""
    ranks = Simulation(FOUR, ErrorFeedback(ONE_OF_FOUR, decay, follow_rate=True), 1)
    assert at_rates(ranks, rates) == [[4, 0, 0, 0], [0, second, 0, 0]]


def test_the_rate_of_a_step_that_was_not_accepted_does_not_count():
    ranks = Simulation(FOUR, ErrorFeedback(ONE_OF_FOUR, follow_rate=True), 1)
    at_rates(ranks, (0.5,))
    assert at_rates(ranks, (0.125,), commit=False) == [[0, 9, 0, 0]]
    assert at_rates(ranks, (0.25,)) == [[0, 5, 0, 0]]


ROUGH = Quantize(2, 16, rounding="nearest")


def test_second_residuals_follow_the_learning_rate_as_well():
    layers = [LayerSpec("w", (300,))]
    following = Simulation(layers, ErrorFeedback(ROUGH, follow_rate=True), 3)
    by_hand = Simulation(layers, ErrorFeedback(ROUGH), 3)
    for rate, factor in ((0.5, 1), (0.25, 2), (0.0625, 4), (0.125, 0.5)):
        following.rate = rate
        for pipeline in by_hand.pipelines:
            pipeline.residuals.first.set(0, pipeline.residuals.first.value(0) * factor)
            for row in range(len(pipeline.residuals.ranges)):
                pipeline.residuals.second.set(row, pipeline.residuals.second.value(row) * factor)
        assert same_bytes(following.step().mean(0), by_hand.step().mean(0))
    assert following.state() == by_hand.state()


@pytest.mark.parametrize("kind", [ROUGH, TopK(0.1)])
def test_a_restored_run_remembers_the_learning_rate(kind):
    layers, rates = [LayerSpec("w", (300,))], (0.5, 0.25, 0.1, 0.3)
    whole, first, second = (Simulation(layers, ErrorFeedback(kind, follow_rate=True), 2) for _ in range(3))
    expected, found = [], []
    for number, rate in enumerate(rates):
        if number == 2:
            for old, new in zip(first.pipelines, second.pipelines, strict=True):
                restore(new, snapshot(old))
        now = second if number >= 2 else first
        whole.rate = now.rate = rate
        gradients = whole.gradients()
        expected.append(whole.step(gradients).mean(0).tobytes())
        found.append(now.step(gradients).mean(0).tobytes())
    assert found == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_feedback_around_none_sends_what_another_plan_left(dtype: str, decay: float):
    layers = [LayerSpec("w", (4,), dtype)]
    ranks = Simulation(layers, ONE_OF_FOUR, 1)
    for pipeline in ranks.pipelines:
        pipeline.propose(plan_for(layers, ErrorFeedback(Identity(), decay), 1))
    assert step(ranks, [4, 2, 1, 0], scale=256.0) == [4, 0, 0, 0]
    assert step(ranks, [1, 0, 0, 0], scale=64.0) == [1, 2 * decay, decay, 0]
    assert residual(ranks) == [0, 0, 0, 0]


# --- momentum correction ------------------------------------------------------------------------------------


# Of every step: gradient, mean, momentum and residual.
MASKED = [
    ([4, 2, 1, 0], [4, 0, 0, 0], [0, 2, 1, 0], [0, 2, 1, 0]),
    ([0, 0, 0, 1], [0, 3, 0, 0], [0, 0, 0.5, 1], [0, 0, 1.5, 1]),
    ([1, 0, 0, 0], [0, 0, 1.75, 0], [1, 0, 0, 0.5], [1, 0, 0, 1.5]),
]
UNMASKED = [
    ([4, 2, 1, 0], [4, 0, 0, 0], [4, 2, 1, 0], [0, 2, 1, 0]),
    ([0, 0, 0, 0], [0, 3, 0, 0], [2, 1, 0.5, 0], [2, 0, 1.5, 0]),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scales", [(1, 1, 1), (1024, 0.25, 8)])
@pytest.mark.parametrize(("mask", "expected"), [(True, MASKED), (False, UNMASKED)])
def test_momentum_starts_again_where_an_element_was_sent_if_it_is_masked(dtype: str, scales, mask, expected):
    ranks = Simulation([LayerSpec("w", (4,), dtype)], MomentumCorrection(ONE_OF_FOUR, 0.5, mask=mask), 1)
    for scale, (gradient, *found) in zip(scales, expected, strict=False):
        assert [step(ranks, gradient, scale=scale), momentum(ranks), residual(ranks)] == found


def test_every_rank_masks_what_it_sent_itself():
    ranks = Simulation(FOUR, MomentumCorrection(ONE_OF_FOUR, 0.5), 2)
    assert step(ranks, [4, 2, 0, 0], [4, 8, 0, 0]) == [2, 4, 0, 0]
    assert [momentum(ranks, rank) for rank in (0, 1)] == [[0, 2, 0, 0], [4, 0, 0, 0]]


def test_a_rank_without_a_gradient_goes_on_with_its_momentum():
    ranks = Simulation(FOUR, MomentumCorrection(Identity(), 0.5), 2)
    assert step(ranks, [4, 2, 1, 0]) == [4, 2, 1, 0]
    assert step(ranks, [0, 0, 0, 8], None) == [2, 1, 0.5, 4]
    assert [momentum(ranks, rank) for rank in (0, 1)] == [[2, 1, 0.5, 8], [2, 1, 0.5, 0]]


def test_momentum_is_not_rounded_on_its_way_uncompressed():
    """In bfloat16, 1 + 3/256 would round to 1 + 4/256, and the mean to 1 + 2/256."""
    ranks = Simulation([LayerSpec("w", (1,), "bfloat16")], MomentumCorrection(Identity(), 0.5), 2)
    step(ranks, [6 / 256], [-2 / 256])
    assert step(ranks, [1]) == [1]


# --- clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("average", "world", "expected"), [(True, 1, 0.2), (True, 4, 0.4), (False, 4, 0.4)])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_shares_are_clipped_to_the_norm_over_the_root_of_n(average, world, expected, scale):
    """Every share gets a norm of 1 / sqrt(N), so the sum of N equal shares has the norm sqrt(N)."""
    layers = [*FOUR, LayerSpec("small", (2,)), LayerSpec("absent", (2,))]
    ranks = Simulation(layers, LocalClip(Identity()), world, average=average)
    gradients = [
        [np.array(g, np.float32) * np.float32(scale) for g in ([3, 0, 4, 0], [0.125, 0.25])] + [None]
    ]
    outcome = ranks.step([list(rank) for rank in gradients * world], scale=scale)
    np.testing.assert_allclose(outcome.mean(0) / scale, expected * np.array([3, 0, 4, 0]), rtol=1e-6)
    total = 1 if average else world
    # Of another layer: not clipped.
    assert (outcome.mean(1) / scale).tolist() == [0.125 * total, 0.25 * total]


@pytest.mark.parametrize("inner", [TopK(0.25, values=Quantize(4, 16)), ROUGH, Identity()])
def test_clipping_comes_before_momentum_in_either_order(inner):
    layers = [LayerSpec("w", (16,))]
    kinds = [
        LocalClip(MomentumCorrection(inner)),
        MomentumCorrection(LocalClip(inner)),
        MomentumCorrection(inner),
    ]
    signs = np.random.default_rng(5).choice(np.array([-1, 1], np.float32), (3, 2, 16))
    means = []
    for kind in kinds:
        ranks = Simulation(layers, kind, 2, config_seed=3)
        # A share of norm 2 sqrt(2) becomes one of 1 / sqrt(2).
        size = np.float32(np.sqrt(2) * (0.25 if kind is kinds[2] else 1))
        means.append([ranks.step([[g * size] for g in drawn]).mean(0) for drawn in signs])
    for other in means[1:]:
        np.testing.assert_allclose(other, means[0], rtol=1e-5)
