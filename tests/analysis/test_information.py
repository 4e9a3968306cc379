"""Entropy and mutual information: known answers, what always holds, and the bias beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp.analysis import (
    entropy,
    gaussian_information,
    gaussian_pair,
    mutual_information,
    total_information,
)
from gradcomp.core.errors import ConfigError

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "few bins": {"bins": 3},
    "quantile": {"binning": "quantile", "bins": 5},
    "2^32 bins": {"bins": 2**32},
}


def test_values_of_known_probabilities_have_their_entropy():
    values = np.repeat([0.0, 1.0, 2.0], [50, 25, 25])
    assert entropy(values, bins=3) == pytest.approx(1.5, abs=1e-12)
    assert entropy(values, bins=2**32) == pytest.approx(1.5, abs=1e-12)
    assert entropy(values, bins=3, binning="quantile") == pytest.approx(1.5, abs=1e-12)


def test_the_largest_value_is_in_the_last_bin():
    assert entropy([0.0, 0.9, 1.0], bins=2) == pytest.approx(math.log2(3) - 2 / 3)


def test_a_table_of_known_probabilities_has_its_information():
    counts = {(0, 0): 4, (0, 1): 1, (1, 0): 1, (1, 1): 2}
    x, y = (np.concatenate([[pair[i]] * count for pair, count in counts.items()]) for i in (0, 1))
    p = {pair: count / 8 for pair, count in counts.items()}
    left, right = [5 / 8, 3 / 8], [5 / 8, 3 / 8]
    # The last line of equation 1.
    expected = -sum(q * math.log2(q) for q in right)
    expected += sum(q * math.log2(q / left[a]) for (a, _), q in p.items())
    found = mutual_information(x, y, bins=2)
    assert found.mutual == pytest.approx(expected, abs=1e-12)
    assert found.conditional == pytest.approx(
        -sum(q * math.log2(q / left[a]) for (a, _), q in p.items()), abs=1e-12
    )
    assert (found.x_bins, found.y_bins, found.cells) == (2, 2, 4)


numbers = st.floats(-(2.0**90), 2.0**90, width=32) | st.sampled_from([0.0, 1.0, 1 + 2.0**-52, 3.0])
values = st.lists(numbers, min_size=2, max_size=40)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@given(pairs=st.lists(st.tuples(numbers, numbers), min_size=2, max_size=40))
@examples(60)
def test_bounds_symmetry_and_the_chain_rule(settings: dict[str, Any], pairs: list[tuple[float, float]]):
    x, y = np.array(pairs).T
    found = mutual_information(x, y, shuffles=1, **settings)
    back = mutual_information(y, x, shuffles=0, **settings)
    tiny = 1e-9
    assert 0 <= found.entropy_x <= math.log2(len(x)) + tiny
    assert -tiny <= found.mutual <= min(found.entropy_x, found.entropy_y) + tiny
    assert found.mutual == pytest.approx(back.mutual, abs=tiny)
    assert found.conditional == found.joint - found.entropy_x
    assert found.mutual == pytest.approx(found.entropy_y - found.conditional, abs=tiny)
    assert -tiny <= found.null <= min(found.entropy_x, found.entropy_y) + tiny
    itself = mutual_information(x, x, shuffles=0, **settings)
    assert itself.mutual == pytest.approx(itself.entropy_x, abs=tiny)


@given(values=values, power=st.integers(-60, 30))
@examples(60)
def test_a_power_of_two_as_scale_changes_nothing(values: list[float], power: int):
    x = np.array(values) * 2.0**-40
    assert entropy(x) == entropy(x * 2.0**power)


@pytest.mark.parametrize("correlation", [0.0, 0.5, -0.9])
@pytest.mark.parametrize("binning", ["uniform", "quantile"])
def test_binned_gaussian_pairs_have_nearly_the_exact_information(correlation: float, binning: Any):
    x, y = gaussian_pair(correlation, 100_000)
    found = mutual_information(x, y, bins=64, binning=binning, correction="miller-madow", shuffles=1)
    exact = -math.log2(1 - correlation**2) / 2
    assert gaussian_information(correlation) == pytest.approx(exact)
    assert found.mutual == pytest.approx(exact, abs=0.03)
    assert found.gaussian == pytest.approx(exact, abs=0.02)
    assert found.null < 0.02


def test_independent_vectors_have_the_bias_that_shuffled_ones_have():
    x, y = gaussian_pair(0.0, 4096)
    found = mutual_information(x, y, shuffles=8)
    predicted = (found.cells - found.x_bins - found.y_bins + 1) / (2 * 4096 * math.log(2))
    assert found.mutual > 0.1
    assert found.mutual == pytest.approx(found.null, abs=0.01)
    assert found.null_deviation < 0.01
    # Many cells hold one element, so the first-order bias is below the true one, and a half is what it removes.
    corrected = mutual_information(x, y, correction="miller-madow", shuffles=0)
    assert corrected.mutual == pytest.approx(found.mutual - predicted)
    assert 0.02 < corrected.mutual < found.mutual / 2


def test_the_papers_quantiser_finds_everything_in_independent_vectors():
    x, y = gaussian_pair(0.0, 4096)
    found = mutual_information(x, y, bins=2**32)
    assert found.entropy_y == 12
    assert found.mutual / found.entropy_y > 0.999
    assert found.null / found.entropy_y > 0.999


def test_vectors_with_the_same_counts_have_the_same_entropy():
    assert entropy([0, 0, 0, 1, 2], bins=3) == entropy([2, 1, 2, 2, 0], bins=3)


def test_a_constant_vector_has_no_entropy_and_no_correlation():
    found = mutual_information(np.zeros(8), np.arange(8))
    assert (found.entropy_x, found.mutual, found.null) == (0, 0, 0)
    assert math.isnan(found.correlation)
    assert math.isnan(found.gaussian)


def test_rices_rule():
    assert mutual_information(np.arange(64), np.arange(64), shuffles=0).bins == 8
    assert mutual_information(np.arange(4096), np.arange(4096), shuffles=0).bins == 32


BAD = {
    "lengths": ((np.zeros(3), np.zeros(4)), {}, "3 values and y 4"),
    "one value": ((np.zeros(1), np.zeros(1)), {}, "at least 2"),
    "not finite": ((np.array([0, np.nan]), np.zeros(2)), {}, "x has values that are not finite"),
    "no numbers": ((["a", "b"], [0, 1]), {}, "real numbers"),
    "one bin": (([0, 1], [0, 1]), {"bins": 1}, "from 2 to 4294967296"),
    "too many bins": (([0, 1], [0, 1]), {"bins": 2**32 + 1}, "from 2 to 4294967296"),
    "too many quantiles": (([0, 1], [0, 1]), {"bins": 2**20, "binning": "quantile"}, "from 2 to 65536"),
    "binning": (([0, 1], [0, 1]), {"binning": "other"}, "uniform or quantile"),
    "correction": (([0, 1], [0, 1]), {"correction": "other"}, "none or miller-madow"),
    "shuffles": (([0, 1], [0, 1]), {"shuffles": -1}, "shuffles must be"),
}


@pytest.mark.parametrize(("arrays", "settings", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_a_typed_error(arrays: Any, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        mutual_information(*arrays, **settings)


# ------------------------------------------------------------------------------------------ Table II

GRADIENT_BYTES, RANKS, STEPS = 102.2e6, 8, 429_300

TABLE_II = {
    "baseline": ([(STEPS, [GRADIENT_BYTES] * RANKS)], 351, 0.5),
    "LGC (parameter server)": (
        [
            (200, [GRADIENT_BYTES] * RANKS),
            (STEPS - 200, [GRADIENT_BYTES / 386] + [GRADIENT_BYTES / 2800] * 7),
        ],
        0.4,
        0.05,
    ),
    "LGC (ring-allreduce)": (
        [(200, [GRADIENT_BYTES] * RANKS), (STEPS - 200, [GRADIENT_BYTES / 202] * RANKS)],
        1.9,
        0.05,
    ),
    "ScaleCom": ([(STEPS, [GRADIENT_BYTES / 96] * RANKS)], 3.6, 0.1),
    "DGC": ([(STEPS, [GRADIENT_BYTES / 277] * RANKS)], 1.2, 0.1),
}


@pytest.mark.parametrize(("phases", "terabytes", "precision"), TABLE_II.values(), ids=TABLE_II)
def test_the_papers_totals_come_out(phases: Any, terabytes: float, precision: float):
    assert total_information(phases) / 1e12 == pytest.approx(terabytes, abs=precision)


@pytest.mark.parametrize(
    "phases", [[(1, [1.0]), (1, [1.0, 2.0])], [(-1, [1.0])], [(1, [math.inf])], [(1, 3.0)]]
)
def test_phases_that_cannot_be_are_refused(phases: Any):
    with pytest.raises(ConfigError):
        total_information(phases)
