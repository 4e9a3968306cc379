"""The benchmark of error tables: a short run of all that it does."""

from __future__ import annotations

import error_tables as bench
import numpy as np
import pytest

from gradcomp import LayerSpec, PowerSGD, Quantize, TopK


def test_both_ways_give_the_same_table():
    layer = LayerSpec("layer", (40, 30))
    values = np.random.default_rng(0).standard_normal(layer.shape, np.float32)
    choices = [Quantize(3), TopK(0.1), PowerSGD(2)]
    mine, theirs = bench.together(choices, layer, values), bench.one_by_one(choices, layer, values)
    np.testing.assert_allclose(mine[:2], theirs[:2], rtol=1e-6)
    assert bench.optimum(choices[2:], layer, values)[0] <= mine[2] * 1.0001 <= theirs[2] * 1.0002


@pytest.mark.full
def test_a_short_run(run_json):
    arguments = ("--models", "resnet20", "--ranges", "bits", "rank", "--rounds", "1")
    rows = run_json("benchmarks/error_tables.py", *arguments)["rows"]
    assert [row["range"] for row in rows] == ["Quantize, 2 to 8 bits", "PowerSGD, ranks 2 to 8"]
    assert all(row["layers"] == 19 and row["ratio"] > 1 for row in rows)
    assert rows[0]["apart"] < 1e-9
    together, one_by_one = rows[1]["above_optimum"]
    assert -1e-3 < together <= one_by_one
