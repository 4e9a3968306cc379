"""RedSync: how near bisection comes, and what it costs."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from compress.selecting import samples, select

from gradcomp import ConfigError, RedSync
from gradcomp.compress.sparse.threshold import PASSES
from gradcomp.kernels import selection

SIZE = 20_000
CONTINUOUS = ["normal", "laplace", "heavy", "uniform", "lognormal", "two scales", "huge"]


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("tolerance", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 0.8])
def test_count_is_within_the_tolerance(name: str, tolerance: float, density: float):
    k = round(density * SIZE)
    (indices,) = select(RedSync(density, tolerance), samples(SIZE)[name]).indices
    assert k <= len(indices) <= np.ceil((1 + tolerance) * k)


def test_of_equal_magnitudes_the_first_are_sent():
    (indices,) = select(RedSync(0.01, 0.5), samples(SIZE)["equal"]).indices
    assert indices == list(range(300))


def test_of_few_values_at_least_k_are_sent():
    layer = samples(SIZE)["few values"]
    for density in (0.001, 0.01, 0.1, 0.5):
        (indices,) = select(RedSync(density, 0.1), layer).indices
        assert density * SIZE <= len(indices) <= np.ceil(1.1 * density * SIZE)


def test_a_pass_is_one_call_for_all_layers_that_are_not_done():
    layers = list(samples(SIZE).values())
    sizes = []

    def tail(table, *arguments):
        sizes.append(len(table))
        return kernel(table, *arguments)

    kernel = selection.tail
    with mock.patch.object(selection, "tail", tail):
        select(RedSync(0.01), *layers)
    assert sizes[:2] == [len(layers)] * 2
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= PASSES + 1


@pytest.mark.parametrize("tolerance", [0, -1, float("nan"), float("inf"), True, "1", None])
def test_impossible_tolerance_is_refused(tolerance):
    with pytest.raises(ConfigError, match="tolerance"):
        RedSync(0.1, tolerance)
