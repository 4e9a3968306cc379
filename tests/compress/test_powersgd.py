"""PowerSGD (Vogels et al. 2019): linearity, warm start, the local residual, ranks, degenerate gradients."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp import LayerSpec, PowerSGD, UnbiasedRank
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.testing.simulation import Simulation, plan_for, true_mean

MATRIX = LayerSpec("matrix", (24, 40))
CONV = LayerSpec("conv", (16, 3, 3, 3))
VECTOR = LayerSpec("vector", (50,), kind="bias")


def low_rank(rank: int, shape: tuple[int, int] = (24, 40), seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    product = generator.standard_normal((shape[0], rank)) @ generator.standard_normal((rank, shape[1]))
    return product.astype(np.float32).reshape(-1)


def best_error(gradient: np.ndarray, rank: int) -> float:
    """What the best approximation of that rank leaves, relative."""
    singular = np.linalg.svd(gradient.reshape(24, 40), compute_uv=False)
    return float(np.sqrt((singular[rank:] ** 2).sum() / (singular**2).sum()))


@pytest.mark.parametrize(
    ("shape", "matrix", "rank"),
    [((24, 40), (24, 40), 4), ((16, 3, 3, 3), (16, 27), 4), ((50,), (50, 1), 0), ((3, 100), (3, 100), 0),
     ((2, 2), (2, 2), 0), ((), (1, 1), 0), ((0, 5), (0, 5), 0)],
)  # fmt: skip
def test_how_a_layer_is_seen(shape, matrix, rank):
    assert matrix_shape(shape) == matrix
    assert clamped_rank(shape, 4) == rank


def test_a_mean_of_that_rank_comes_back_whole():
    ranks = Simulation([MATRIX, VECTOR], PowerSGD(3), 3)
    one = low_rank(3)
    gradients = [[one * (r + 1), np.full(50, r, np.float32)] for r in range(3)]
    outcome = ranks.step(gradients)
    np.testing.assert_allclose(outcome.mean(0), 2 * one, rtol=0, atol=2e-5 * np.abs(one).max())
    np.testing.assert_array_equal(outcome.mean(1), np.ones(50))


@pytest.mark.parametrize("compressor", [PowerSGD(2), UnbiasedRank(2)])
def test_many_ranks_are_one_rank_with_the_mean(compressor):
    """Vogels et al. 2019, appendix A.3: linearity, since all ranks have the same factors."""
    many, one = (Simulation([MATRIX, CONV, VECTOR], compressor, world) for world in (4, 1))
    for _ in range(4):
        gradients = many.gradients()
        mean = [[true_mean(gradients, layer).astype(np.float32) for layer in range(3)]]
        for got, want in zip(many.step(gradients).all_means(), one.step(mean).all_means(), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("alternate", [False, True])
def test_a_warm_start_finds_the_best_approximation(alternate: bool):
    """Vogels et al. 2019, section 4.2: the same matrix again and again; without feedback, so that it stays the same."""
    gradient = np.random.default_rng(3).standard_normal(24 * 40).astype(np.float32)
    gradient += 2 * low_rank(2)
    best = best_error(gradient, 2)

    def errors(compressor: PowerSGD) -> list[float]:
        ranks = Simulation([MATRIX], compressor, 2)
        norm = np.linalg.norm(gradient)
        return [
            float(np.linalg.norm(ranks.step([[gradient]] * 2).mean(0) - gradient) / norm) for _ in range(12)
        ]

    warm = errors(PowerSGD(2, feedback=False, alternate=alternate))
    assert warm[-1] < 1.01 * best
    assert warm[0] > warm[-1]
    cold = errors(PowerSGD(2, feedback=False, warm_start=False))
    assert np.mean(cold) > 1.02 * best


def test_the_residual_is_that_of_the_local_projection():
    """Vogels et al. 2019, Algorithm 2, line 8: it lies outside of the basis that all ranks share."""
    ranks = Simulation([MATRIX], PowerSGD(2), 3)
    gradients = ranks.gradients()
    mean = ranks.step(gradients).mean(0).reshape(24, 40)
    basis = np.linalg.svd(mean, full_matrices=False)[0][:, :2]
    for rank, pipeline in enumerate(ranks.pipelines):
        gradient = gradients[rank][0].reshape(24, 40)
        residual = pipeline.residuals.first.value(0).reshape(24, 40)
        np.testing.assert_allclose(residual, gradient - basis @ (basis.T @ gradient), atol=2e-5)


def test_residuals_stay_bounded():
    """The averaged form's grow without end; the local form's norm settles."""
    ranks = Simulation([MATRIX], PowerSGD(4), 4)
    norms = []
    for _ in range(200):
        ranks.step()
        norms.append(np.linalg.norm(ranks.pipelines[0].residuals.first.value(0)))
    assert np.mean(norms[150:]) < 1.2 * np.mean(norms[50:100])


@pytest.mark.parametrize("alternate", [False, True])
def test_columns_are_kept_at_a_new_rank(alternate: bool):
    ranks = Simulation([MATRIX], PowerSGD(3, alternate=alternate), 2)
    for _ in range(2):
        ranks.step()
    before = ranks.pipelines[0].fields["powersgd_q"].value(0).reshape(3, 40).copy()
    for version, rank in ((1, 5), (2, 2)):
        for pipeline in ranks.pipelines:
            pipeline.propose(plan_for([MATRIX], PowerSGD(rank, alternate=alternate), version))
            pipeline.fields["powersgd_q"].set(0, before.reshape(-1))
        ranks.step(commit=False)
        ranks.pipelines[0].lay_out()
        after = ranks.pipelines[0].fields["powersgd_q"].value(0).reshape(-1, 40)
        assert len(after) == rank
        kept = min(rank, 3)
        np.testing.assert_array_equal(after[:kept], before[:kept])
        assert after[kept:].any(axis=1).all()


@pytest.mark.parametrize("alternate", [False, True])
def test_a_layer_of_zeros_does_not_stop_it_for_ever(alternate: bool):
    ranks = Simulation([MATRIX], PowerSGD(2, alternate=alternate), 2)
    for _ in range(3):
        assert not ranks.step([[np.zeros(960, np.float32)]] * 2).mean(0).any()
    gradient = low_rank(1)
    total = sum(ranks.step([[gradient]] * 2).mean(0) for _ in range(4)) / 4
    np.testing.assert_allclose(total, gradient, atol=1e-4 * np.abs(gradient).max())
    # Of rank one now, and of full rank later: the second column must still be alive.
    wide = low_rank(2, seed=9)
    means = sum(ranks.step([[wide]] * 2).mean(0) for _ in range(12)) / 12
    assert np.linalg.norm(means - wide) < 0.1 * np.linalg.norm(wide)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e15])
def test_tiny_and_huge_gradients(size: float):
    ranks = Simulation([MATRIX], PowerSGD(2), 2)
    gradient = low_rank(2) * np.float32(size)
    for _ in range(4):
        mean = ranks.step([[gradient]] * 2).mean(0)
    np.testing.assert_allclose(mean, gradient, rtol=0, atol=1e-4 * np.abs(gradient).max())


def test_a_rank_above_the_smaller_side_is_clamped_and_said():
    tall = LayerSpec("tall", (100, 4))
    assert PowerSGD(3).remark(tall) is None
    assert "100 x 4" in PowerSGD(8).remark(tall)
    ranks = Simulation([tall], PowerSGD(8), 2)
    gradients = ranks.gradients()
    np.testing.assert_allclose(ranks.step(gradients).mean(0), true_mean(gradients, 0), atol=1e-6)
