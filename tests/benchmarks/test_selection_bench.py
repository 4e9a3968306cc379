"""The selection benchmark: what its figures mean, and a short run of all of it."""

from __future__ import annotations

import numpy as np
import pytest
import selection as bench

ROW = {"isa": "avx512", "input": "normal", "density": 0.01, "method": "exact", "milliseconds": 4.0,
       "torch_milliseconds": 100.0, "found": 1.0, "right": True, "bar": 15.0}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "missed"),
    [({}, False), ({"milliseconds": 8.0}, True), ({"right": False}, True), ({"bar": None}, False)],
)
def test_a_figure_misses_its_bar(changes, missed):
    assert bench.Row(**{**ROW, **changes}).missed is missed


def test_a_wrong_selection_is_noticed():
    gradient = np.random.default_rng(0).standard_normal(5000, np.float32)
    work = bench.Workload(gradient, 0.01)
    assert work.exact_is_right()
    work.offsets += 1
    assert not work.exact_is_right()


def test_an_embedding_is_mostly_zero_rows():
    gradient = bench.embedding(1_000_050, np.random.default_rng(0))
    used = (gradient[:1_000_000].reshape(-1, bench.ROW_LENGTH) != 0).any(axis=1)
    assert 0.005 < used.mean() < 0.1  # of 10,000 words, those among 700
    assert not gradient[1_000_000:].any()


@pytest.mark.full
def test_a_short_run(run_json):
    rows = run_json("benchmarks/selection.py", "--elements", "20000", "--rounds", "1", check=False)["rows"]
    assert len(rows) == 3 * len(bench.INPUTS) * len(bench.DENSITIES)
    assert all(row["right"] for row in rows)
    assert {row["bar"] for row in rows if row["isa"] != "baseline"} <= {1.0, 15.0, 30.0}
