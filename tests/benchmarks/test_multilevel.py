"""The benchmark of multi-level selections: what its figures mean, and a short run."""

from __future__ import annotations

import multilevel as bench
import pytest


@pytest.fixture(scope="module")
def network():
    model, batches = bench.resnet()
    return bench.specs(model), batches


def test_an_exact_selection_is_the_same_both_ways(network):
    work = bench.Work(*network, "TopK", (10, 1000))
    assert work.is_right()
    work.gradients[3][:5] = 1e3  # the second selection would have to see these
    work.levels.refine(work.context)
    assert not (work.levels.candidate().values == 1e3).any()
    assert work.is_right(), "which selects anew"


def test_the_methods_select_what_they_are_asked_for(network):
    for method in bench.METHODS:
        work = bench.Work(*network, method, (10, 100))
        found = work.multilevel()
        assert 0.5 < found.counts.sum() / (0.01 * sum(len(g) for g in work.gradients)) <= 1.1


@pytest.mark.full
def test_a_short_run(run_json):
    found = run_json("benchmarks/multilevel.py", "--models", "ResNet-20", "--rounds", "1")
    assert [row["method"] for row in found["rows"]] == list(bench.METHODS)
    assert all(row["right"] and row["speedup"] > 0 for row in found["rows"])
    assert len(found["swaps"]) == 6
    assert {swap["layers"] for swap in found["swaps"]} == {65, 160}
