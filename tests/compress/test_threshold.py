"""Tests the compressors that select by a threshold: what they have in common, and the equations of each."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
from compress.selecting import largest, samples, select

from gradcomp import DGC, AdaComp, Compressor, GlobalTopK, LayerSpec, RedSync, SIDCo, Threshold, TopK
from gradcomp.compress.sparse.threshold import PASSES
from gradcomp.kernels.devices import HOST
from gradcomp.testing.simulation import Simulation, plan_for

COMPRESSORS = [
    DGC(0.01),
    DGC(0.5, sample=0.5),
    RedSync(0.01),
    RedSync(0.6, tolerance=0.05),
    SIDCo(0.01),
    SIDCo(0.3, stages=1),
    SIDCo(0.005, stages=5, distribution="pareto"),
    TopK(0.3),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=Compressor.to_string)
every_selection = pytest.mark.parametrize(
    "compressor", [*COMPRESSORS, GlobalTopK(0.9), AdaComp(limit=1.0)], ids=Compressor.to_string
)
SIZE, LARGE = 20_000, 100_000
EIGHT, FIVE = LayerSpec("a", (8,)), LayerSpec("b", (5,))


@every_compressor
@pytest.mark.parametrize("name", samples(1))
def test_selection_is_of_the_largest_and_within_its_limit(compressor: Compressor, name: str):
    found = select(compressor, samples(SIZE)[name])
    assert largest(found.p[0], len(found.indices[0])).tolist() == found.indices[0]
    assert min(1, np.count_nonzero(found.p[0])) <= len(found.indices[0]) <= found.limits[0]
    assert found.values[0] == found.p[0][found.indices[0]].tolist()
    assert found.flags == [0]


@every_selection
def test_no_zero_is_selected(compressor: Compressor):
    layers = samples(SIZE)
    layers["one of many"] = np.where(np.arange(SIZE) == 77, np.float32(-1e-45), np.float32(-0.0))
    found = select(compressor, *layers.values())
    assert all(map(all, found.values))
    zero, one = (found.indices[list(layers).index(name)] for name in ("zero", "one of many"))
    assert (zero, one) == ([], [77])


def test_top_k_selects_k_or_all_that_are_not_zero():
    layers = {"empty": np.zeros(0, np.float32), **samples(SIZE)}
    for density in (0.001, 0.3, 1.0):
        with_zeros, without = (
            select(TopK(density, zeros=zeros), *layers.values()) for zeros in (True, False)
        )
        assert [len(row) for row in with_zeros.indices] == with_zeros.limits
        for p, indices, expected in zip(with_zeros.p, without.indices, with_zeros.indices, strict=True):
            assert indices == [i for i in expected if p[i] != 0]


@pytest.mark.parametrize("compressor", [*COMPRESSORS, AdaComp(limit=1.0)], ids=Compressor.to_string)
def test_layers_of_a_group_are_selected_as_if_they_were_alone(compressor: Compressor):
    layers = [x[: SIZE // (i + 1)] for i, x in enumerate(samples(SIZE).values())]
    layers.insert(3, np.zeros(0, np.float32))
    layers.insert(5, np.array([1, np.nan, 2], np.float32))
    together = select(compressor, *layers, step=3)
    for i, layer in enumerate(layers):
        alone = select(compressor, layer, step=3)
        assert alone.indices == [together.indices[i]]
        assert alone.flags == [together.flags[i]]
        assert len(layer) or (alone.indices, alone.flags, alone.limits) == ([[]], [0], [0])


@every_selection
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_layer_that_is_not_finite_selects_nothing(compressor: Compressor, value: float):
    layer = np.ones(100, np.float32)
    layer[7] = value
    found = select(compressor, layer)
    assert found.flags == [1]
    assert found.indices == [[]]


@pytest.mark.parametrize("kind", [DGC, RedSync, SIDCo])
@pytest.mark.parametrize("size", [1, 3, 50_000])
def test_density_one_selects_all(kind: type, size: int):
    layer = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    assert select(kind(1.0), layer).indices == [list(range(size))]


@every_compressor
def test_selection_is_made_from_gradient_and_residual(compressor: Compressor):
    rng = np.random.default_rng(0)
    gradient, residual = rng.standard_normal((2, 5000)).astype(np.float32)
    apart = select(compressor, gradient, residuals=[residual])
    assert apart.indices == select(compressor, gradient + residual).indices
    assert np.array_equal(apart.p[0], gradient + residual)


def test_small_layers_of_dgc_are_selected_as_top_k_selects_them():
    for size in (1, 2, 9, 1000):
        for name, layer in samples(size, seed=size).items():
            for density in (0.001, 0.05, 0.5):
                found, exact = select(DGC(density), layer, step=size), select(TopK(density), layer)
                assert found.indices == exact.indices, (size, name, density)


# --- Threshold ----------------------------------------------------------------------------------------------


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_what_reaches_the_threshold_is_sent():
    ranks = Simulation([EIGHT], Threshold(0.5, feedback=False), 1)
    got = ranks.step([[vector(0.5, -0.5, 0.49999997, 0, -7, 0.1, 1, -0.4)]]).mean(0)
    np.testing.assert_array_equal(got, vector(0.5, -0.5, 0, 0, -7, 0, 1, 0))


def test_small_elements_wait_until_they_add_up():
    ranks = Simulation([FIVE], Threshold(1.0), 1)
    sent = [ranks.step([[vector(0.4, 0, 0.5, 2, -0.25)]]).mean(0) for _ in range(4)]
    np.testing.assert_allclose(
        sent, [[0, 0, 0, 2, 0], [0, 0, 1, 2, 0], [1.2, 0, 0, 2, 0], [0, 0, 1, 2, -1]], rtol=1e-6
    )


def test_capacity_keeps_the_largest_and_of_equals_the_first():
    ranks = Simulation([EIGHT], Threshold(0.5, capacity=0.5, feedback=False), 1)
    got = ranks.step([[vector(1, -2, 1, 3, -1, 1, 0.6, 4)]]).mean(0)
    np.testing.assert_array_equal(got, vector(1, -2, 0, 3, 0, 0, 0, 4))


def test_layers_have_thresholds_of_their_own():
    plan = plan_for([EIGHT, FIVE], Threshold(0.5, feedback=False))
    other = dataclasses.replace(
        plan, assignments=(plan.assignments[0], dataclasses.replace(plan.assignments[1], level=2.0))
    )
    ranks = Simulation([EIGHT, FIVE], other, 1)
    got = ranks.step([[np.ones(8, np.float32), vector(1, 2, 3, 1, -2)]]).all_means()
    np.testing.assert_array_equal(got[0], 1)
    np.testing.assert_array_equal(got[1], vector(0, 2, 3, 0, -2))


# --- RedSync ------------------------------------------------------------------------------------------------


CONTINUOUS = ["normal", "laplace", "heavy", "uniform", "lognormal", "two scales", "huge", "few values"]


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("tolerance", [0.1, 1.0])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.8])
def test_redsync_count_is_within_the_tolerance(name: str, tolerance: float, density: float):
    k = round(density * SIZE)
    layer = samples(SIZE)[name]
    (indices,) = select(RedSync(density, tolerance), layer).indices
    assert min(k, np.count_nonzero(layer)) <= len(indices) <= np.ceil((1 + tolerance) * k)


def test_of_equal_magnitudes_redsync_sends_the_first():
    (indices,) = select(RedSync(0.01, 0.5), samples(SIZE)["equal"]).indices
    assert indices == list(range(300))


def test_a_pass_is_one_call_for_all_layers_that_are_not_done():
    layers = list(samples(SIZE).values())
    sizes = []

    def tail(table, *arguments):
        sizes.append(len(table))
        return kernel(table, *arguments)

    kernel = HOST.kernels.tail
    with mock.patch.object(HOST.kernels, "tail", tail):
        select(RedSync(0.01), *layers)
    assert sizes[:2] == [len(layers)] * 2
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= PASSES + 1


# --- SIDCo --------------------------------------------------------------------------------------------------


FITTING = {"exponential": ["laplace", "normal", "heavy"], "pareto": ["laplace", "normal", "heavy", "uniform"]}


@pytest.mark.parametrize("density", [0.0002, 0.01, 0.3])
@pytest.mark.parametrize("distribution", FITTING)
@pytest.mark.parametrize("name", samples(1))
def test_between_half_and_twice_the_elements_are_sent(name: str, distribution: str, density: float):
    k = round(density * LARGE)
    for stages in (1, 4):
        layer = samples(LARGE)[name]
        (indices,) = select(SIDCo(density, stages, distribution), layer).indices
        assert min(k / 2, np.count_nonzero(layer)) <= len(indices) <= 2 * k


@pytest.mark.parametrize(
    ("distribution", "name"), [(d, name) for d, names in FITTING.items() for name in names]
)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_stages_come_near_the_density_where_the_tail_fits(distribution: str, name: str, density: float):
    (indices,) = select(SIDCo(density, 6, distribution), samples(LARGE)[name]).indices
    assert 0.75 <= len(indices) / (density * LARGE) <= 1.25


def reaching(layer: np.ndarray, threshold: float) -> list[int]:
    return np.flatnonzero(np.abs(layer) >= np.float32(threshold)).tolist()


def test_one_exponential_stage_is_its_formula():
    layer = samples(LARGE)["laplace"]
    mean = np.abs(layer).astype(np.float64).mean()
    assert select(SIDCo(0.01, 1), layer).indices == [reaching(layer, -mean * np.log(0.01))]


def test_a_second_stage_fits_the_exceedances_of_the_first():
    layer = samples(LARGE)["normal"]
    x = np.abs(layer).astype(np.float64)
    first = float(np.float32(-x.mean() * np.log(0.25)))
    left = x[x >= first]
    second = first - (left - first).mean() * np.log(0.02 * LARGE / len(left))
    assert select(SIDCo(0.02, 2), layer).indices == [reaching(layer, second)]


def test_one_pareto_stage_is_its_formula():
    layer = samples(LARGE)["heavy"]
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


# --- AdaComp ------------------------------------------------------------------------------------------------


def test_an_example_by_hand():
    g = np.array([1, -1, 3, 0, -2, 0.5], np.float32)
    e = np.array([1, 4, 1, 3, -1, 0.5], np.float32)
    # G = 2 3 4 | 3 -3 1 and H = 3 2 7 | 3 -5 1.5, against maxima of 4 and 3
    found = select(AdaComp(bin_size=3, limit=1.0), g, residuals=[e])
    assert found.indices == [[2, 3, 4]]
    assert found.values == [[4, 3, -3]]


@pytest.mark.parametrize("name", samples(1))
def test_without_a_residual_what_has_half_of_the_largest_is_sent(name: str):
    g = samples(1000)[name]
    found = select(AdaComp(bin_size=30, limit=1.0), g)
    double = 2 * g.astype(np.float64)
    expected = [
        i
        for begin in range(0, 1000, 30)
        for i in range(begin, min(begin + 30, 1000))
        if g[i] and abs(double[i]) >= np.abs(g[begin : begin + 30]).max()
    ]
    assert found.indices == [expected]


def test_the_more_there_is_of_residuals_the_less_is_sent():
    rng = np.random.default_rng(0)
    g, e = rng.standard_normal((2, 10_000)).astype(np.float32)
    sent = [len(select(AdaComp(500, 1.0), g, residuals=[size * e]).indices[0]) for size in (0, 1, 10)]
    assert sent[0] > 2 * sent[1] > 8 * sent[2] > 0


def test_of_more_than_the_limit_the_largest_are_sent():
    g = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    everything = select(AdaComp(1, 1.0), g)  # every element is the largest of its bin
    assert everything.indices == [list(range(1000))]
    limited = select(AdaComp(500, 0.01), g)
    assert limited.limits == [10]
    assert limited.indices == [largest(g, 10).tolist()]


def test_every_bin_may_send_one_element():
    assert select(AdaComp(2, 0.1), np.ones(7, np.float32)).limits == [4]
    assert select(AdaComp(500, 0.1), np.ones(7, np.float32)).limits == [1]
    assert select(AdaComp(500, 0.1), np.ones(0, np.float32)).limits == [0]
