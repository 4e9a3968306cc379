"""RandomK: what is sent, and what stays."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp import ConfigError, LayerSpec, RandomBlock, RandomK
from gradcomp.kernels.philox import strata
from gradcomp.testing.simulation import Simulation, true_mean

LAYERS = [LayerSpec("a", (100,)), LayerSpec("empty", (0,)), LayerSpec("b", (7, 9))]
random_kinds = pytest.mark.parametrize("kind", [RandomK, RandomBlock])


def expected_counts(density: float) -> list[int]:
    return [max(1, round(density * layer.size)) if layer.size else 0 for layer in LAYERS]


@random_kinds
@pytest.mark.parametrize("density", [1e-9, 0.05, 0.1, 0.33, 1.0])
def test_the_true_mean_comes_back_at_k_elements_and_nothing_elsewhere(kind, density: float):
    ranks = Simulation(LAYERS, kind(density, feedback=False), 3)
    gradients = ranks.gradients()
    means = ranks.step(gradients).all_means()
    for layer, count in enumerate(expected_counts(density)):
        sent = np.flatnonzero(means[layer])
        assert len(sent) == count
        np.testing.assert_allclose(
            means[layer][sent], true_mean(gradients, layer)[sent], rtol=1e-5, atol=1e-7
        )


@random_kinds
def test_the_residual_is_what_was_not_sent_and_nothing_where_it_was(kind):
    ranks = Simulation(LAYERS, kind(0.1), 2)
    gradients = ranks.gradients()
    means = ranks.step(gradients).all_means()
    for rank, pipeline in enumerate(ranks.pipelines):
        for layer in (0, 2):
            kept = pipeline.residuals.first.value(layer)
            np.testing.assert_array_equal(kept, np.where(means[layer] != 0, 0, gradients[rank][layer]))


@random_kinds
def test_every_element_is_sent_sooner_or_later(kind):
    ranks = Simulation([LAYERS[0]], kind(0.1, feedback=False), 2)
    seen = np.zeros(100, bool)
    for _ in range(200):
        seen |= ranks.step().mean(0) != 0
    assert seen.all()


def test_scaled_values_are_multiplied_by_the_size_of_their_stratum():
    ranks = Simulation([LAYERS[0]], RandomK(0.07, scaled=True), 2)
    gradients = ranks.gradients()
    mean = ranks.step(gradients).mean(0)
    sizes = strata(np.array([100]), np.array([7]))[1]
    sent = np.flatnonzero(mean)
    np.testing.assert_allclose(mean[sent], sizes * true_mean(gradients, 0)[sent], rtol=1e-5)
    assert set(sizes.tolist()) == {14, 15}


def test_scaled_blocks_are_multiplied_by_n_over_k():
    ranks = Simulation([LAYERS[0]], RandomBlock(0.08, scaled=True), 2)
    gradients = ranks.gradients()
    mean = ranks.step(gradients).mean(0)
    sent = np.flatnonzero(mean)
    np.testing.assert_allclose(mean[sent], 12.5 * true_mean(gradients, 0)[sent], rtol=1e-5)


@random_kinds
def test_scaled_values_have_no_residual(kind):
    ranks = Simulation(LAYERS, kind(0.1, scaled=True), 2)
    ranks.step()
    assert ranks.pipelines[0].residuals.nbytes == 0


@random_kinds
def test_a_summand_of_a_layer_that_is_not_finite_is_nan(kind):
    ranks = Simulation([LAYERS[0]], kind(0.05), 2, record=True)
    gradients = ranks.gradients()
    gradients[1][0][:] = np.inf
    gradients[1][0][0] = 1.0
    ranks.step(gradients)
    summands = [np.frombuffer(rank.transport.sent[0][1], np.float32)[:5] for rank in ranks.ranks]
    assert np.isfinite(summands[0]).all()
    assert np.isnan(summands[1]).all()


@random_kinds
@pytest.mark.parametrize("density", [0, -0.1, 1.1, float("nan"), True, "much", None])
def test_a_density_outside_of_its_range_is_refused(kind, density):
    with pytest.raises(ConfigError, match="density"):
        kind(density)


@random_kinds
@pytest.mark.parametrize(
    "arguments", [{"scaled": 1}, {"feedback": 0}, {"feedback": "yes"}, {"scaled": True, "feedback": True}]
)
def test_impossible_settings_are_refused(kind, arguments):
    with pytest.raises(ConfigError, match=r"scaled|feedback"):
        kind(**arguments)


@random_kinds
def test_feedback_is_on_unless_scaled(kind):
    assert kind().traits.keeps_residual
    assert not kind(scaled=True).traits.keeps_residual
    assert not kind(feedback=False).traits.keeps_residual
