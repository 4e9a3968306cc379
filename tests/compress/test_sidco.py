"""SIDCo: its fits, and how near they come to the density."""

from __future__ import annotations

import numpy as np
import pytest
from compress.selecting import samples, select

from gradcomp import ConfigError, SIDCo

SIZE = 100_000
FITTING = {"exponential": ["laplace", "normal", "heavy"], "pareto": ["laplace", "normal", "heavy", "uniform"]}


@pytest.mark.parametrize("density", [0.0002, 0.01, 0.3])
@pytest.mark.parametrize("distribution", FITTING)
@pytest.mark.parametrize("name", samples(1))
def test_between_half_and_twice_the_elements_are_sent(name: str, distribution: str, density: float):
    k = round(density * SIZE)
    for stages in (1, 4):
        layer = samples(SIZE)[name]
        (indices,) = select(SIDCo(density, stages, distribution), layer).indices
        assert min(k / 2, np.count_nonzero(layer)) <= len(indices) <= 2 * k


@pytest.mark.parametrize(
    ("distribution", "name"), [(d, name) for d, names in FITTING.items() for name in names]
)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_stages_come_near_the_density_where_the_tail_fits(distribution: str, name: str, density: float):
    (indices,) = select(SIDCo(density, 6, distribution), samples(SIZE)[name]).indices
    assert 0.75 <= len(indices) / (density * SIZE) <= 1.25


def reaching(layer: np.ndarray, threshold: float) -> list[int]:
    return np.flatnonzero(np.abs(layer) >= np.float32(threshold)).tolist()


def test_one_exponential_stage_is_its_formula():
    layer = samples(SIZE)["laplace"]
    mean = np.abs(layer).astype(np.float64).mean()
    assert select(SIDCo(0.01, 1), layer).indices == [reaching(layer, -mean * np.log(0.01))]


def test_a_second_stage_fits_the_exceedances_of_the_first():
    layer = samples(SIZE)["normal"]
    x = np.abs(layer).astype(np.float64)
    first = float(np.float32(-x.mean() * np.log(0.25)))
    left = x[x >= first]
    second = first - (left - first).mean() * np.log(0.02 * SIZE / len(left))
    assert select(SIDCo(0.02, 2), layer).indices == [reaching(layer, second)]


def test_one_pareto_stage_is_its_formula():
    layer = samples(SIZE)["heavy"]
    x = np.abs(layer).astype(np.float64)
    ratio = x.mean() ** 2 / x.var()
    xi, sigma = (1 - ratio) / 2, x.mean() * (ratio + 1) / 2
    threshold = sigma / xi * (0.01**-xi - 1)
    assert select(SIDCo(0.01, 1, "pareto"), layer).indices == [reaching(layer, threshold)]


def test_pareto_becomes_exponential_where_its_shape_is_zero():
    # Two magnitudes with a mean of 1 and a variance of 1: a shape of exactly 0.
    layer = np.tile(np.array([0, 2], np.float32), 500)
    same = [select(SIDCo(0.4, 1, distribution), layer).indices for distribution in FITTING]
    assert same[0] == same[1]
    assert len(same[0][0]) == 500


def test_equal_magnitudes_are_sent_though_no_fit_reaches_them():
    for value in (1.0, -1e-30, 1e30):
        layer = np.full(1000, value, np.float32)
        for distribution in FITTING:
            assert select(SIDCo(0.01, distribution=distribution), layer).indices == [list(range(20))]


@pytest.mark.parametrize("stages", [0, -1, 1.5, True, "2", None])
def test_impossible_stages_are_refused(stages):
    with pytest.raises(ConfigError, match="stages"):
        SIDCo(0.1, stages)


@pytest.mark.parametrize("distribution", ["gamma", "", None, 1])
def test_unknown_distribution_is_refused(distribution):
    with pytest.raises(ConfigError, match="exponential, pareto"):
        SIDCo(0.1, distribution=distribution)
