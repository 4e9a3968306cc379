"""The comparison of two versions: its interval, and its figures of a row."""

from __future__ import annotations

import compare_versions
import pytest


def test_the_interval_holds_the_median_of_100_values_between_the_40th_and_the_61st():
    """Tables of order statistics give these ranks, with a probability of 96.5%."""
    assert compare_versions.interval([float(value) for value in range(100, 0, -1)]) == (40.0, 61.0)
    assert compare_versions.interval([float(value) for value in range(1, 7)]) == (1.0, 6.0)
    with pytest.raises(SystemExit, match="at least 6"):
        compare_versions.interval([1.0] * 5)


def test_a_row_pools_the_pairs_of_all_starts_and_shows_how_much_starts_differ():
    found = compare_versions.summary(
        "none", [([1.0, 1.0, 2.0], [0.9, 0.8, 1.4]), ([1.0, 1.0, 1.0], [1.1, 1.2, 1.3])]
    )
    assert (found["pairs"], found["before"], found["after"]) == (6, 1000.0, 1150.0)
    assert found["ratio"] == pytest.approx(1.0)
    assert (found["low"], found["high"]) == pytest.approx((0.7, 1.3))
    assert (found["lowest start"], found["highest start"]) == pytest.approx((0.8, 1.2))
