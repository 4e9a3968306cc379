"""AdaComp: what it selects from a bin, and how much."""

from __future__ import annotations

import numpy as np
import pytest
from compress.selecting import is_top, samples, select

from gradcomp import AdaComp, ConfigError


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
    assert len(limited.indices[0]) == 10
    assert is_top(g, limited.indices[0])


def test_there_is_room_for_one_element_of_every_bin():
    assert select(AdaComp(2, 0.1), np.ones(7, np.float32)).limits == [4]
    assert select(AdaComp(500, 0.1), np.ones(7, np.float32)).limits == [1]
    assert select(AdaComp(500, 0.1), np.ones(0, np.float32)).limits == [0]


def test_a_bin_of_zeros_sends_nothing():
    g = np.zeros(40, np.float32)
    assert select(AdaComp(10, 1.0), g).indices == [[]]
    g[25] = -1
    assert select(AdaComp(10, 1.0), g).indices == [[25]]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_layer_that_is_not_finite_sends_nothing_and_the_others_do(value: float):
    bad = np.ones(40, np.float32)
    bad[3] = value
    found = select(AdaComp(10, 1.0), np.ones(20, np.float32), bad, np.zeros(0, np.float32))
    assert found.flags == [0, 1, 0]
    assert found.indices == [list(range(20)), [], []]


@pytest.mark.parametrize("bin_size", [0, -1, 2.5, True, "10", None])
def test_impossible_bin_is_refused(bin_size):
    with pytest.raises(ConfigError, match="bin_size"):
        AdaComp(bin_size)


@pytest.mark.parametrize("limit", [0, -1, 1.1, float("nan"), True, "1", None])
def test_impossible_limit_is_refused(limit):
    with pytest.raises(ConfigError, match="limit"):
        AdaComp(limit=limit)
