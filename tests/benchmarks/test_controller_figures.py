"""The figures of sensitivity.py and objectives.py, from numbers that are known."""

from __future__ import annotations

import numpy as np
import objectives
import pytest
import sensitivity


def table(losses, norms=((3.0, 1.0), (6.0, 2.0), (9.0, 4.0)), **chosen):
    return {
        "levels": [[2, 4]] * 3,
        "norms": [list(each) for each in norms],
        "losses": [list(each) for each in losses],
        "costs": [[1.0, 3.0]] * 3,
        "reference": [1, 1, 1],
        "chosen": chosen,
    }


def test_equal_values_share_their_rank():
    assert sensitivity.ranked(np.array([5.0, 1.0, 5.0, 7.0])).tolist() == [1.5, 0.0, 1.5, 3.0]


def test_correlations_by_level_and_of_all_cells():
    """At level 2 the loss falls as the norm rises; at level 4 it is the squared norm."""
    rows = sensitivity.correlations([table([(-3.0, 1.0), (-6.0, 4.0), (-9.0, 16.0)])])
    two, four, everything = rows
    assert [row["level"] for row in rows] == ["2", "4", "all"]
    assert (two["spearman"], two["pearson"]) == (pytest.approx(-1), pytest.approx(-1))
    assert (four["spearman"], four["pearson_squared"]) == (pytest.approx(1), pytest.approx(1))
    assert four["pearson"] < 1
    assert everything["spearman"] < 0
    assert sensitivity.correlation(np.ones(5), np.arange(5.0)) is None


def test_plans_are_compared_by_levels_and_bytes():
    seen = [table([(1.0, 0.0)] * 3, loss=[0, 1, 0], norm=[0, 1, 1])]
    assert sensitivity.plans(seen, "norm") == {
        "same": pytest.approx(2 / 3),
        "distance": pytest.approx(1 / 3),
        "bytes_loss": pytest.approx(5 / 9),
        "bytes_other": pytest.approx(7 / 9),
    }


def test_a_line_is_found_and_one_that_is_none_is_not():
    draw = np.random.default_rng(0)
    x = draw.random((20, 3))
    fit = objectives.regress(x, 2.0 + x @ [1.0, 5.0, 3.0])
    assert fit["constant"] == pytest.approx(2)
    assert fit["slopes"] == pytest.approx([1, 5, 3])
    assert min(fit["r2"], fit["r2_left_out"]) == pytest.approx(1)
    assert objectives.regress(x, draw.random(20))["r2_left_out"] < 0.3


def test_the_buckets_of_a_layer_count_once_for_the_settings_that_a_fit_needs():
    """Five settings, two layers: nine buckets of theirs can be fitted, buckets of four layers cannot."""
    draw = np.random.default_rng(1)
    layers = draw.random((5, 4))
    buckets = np.repeat(layers[:, :2], (4, 5), axis=1)
    fit = objectives.regress_by_bucket(buckets, 1.0 + layers[:, :2] @ [8.0, 5.0])
    assert fit["slopes"] == pytest.approx([2.0] * 4 + [1.0] * 5)
    assert min(fit["r2"], fit["r2_left_out"]) == pytest.approx(1)
    assert objectives.regress_by_bucket(layers, draw.random(5)) is None
