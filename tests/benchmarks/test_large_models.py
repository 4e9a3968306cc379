"""Tests the shapes and the figures of the benchmark of large models."""

from __future__ import annotations

import math

import large_models
import pytest


@pytest.mark.parametrize(
    ("name", "millions"),
    [("lstm", 10.5764), ("gpt2", 124.440), ("gpt2-medium", 354.823), ("gpt2-large", 774.030)],
)
def test_shapes_have_as_many_parameters_as_the_model(name: str, millions: float):
    assert sum(map(math.prod, large_models.shapes_of(name))) == pytest.approx(1e6 * millions, rel=1e-5)


def test_the_slower_rank_and_the_larger_memory_count():
    one = {"parameters": 1000, "alone": 1.0, "step": 1.5, "peak": 5000, "layers": 3}
    other = {"parameters": 1000, "alone": 1.0, "step": 1.25, "peak": 7000, "layers": 3}
    found = large_models.evaluate([one, other])
    assert (found["tail"], found["ns"], found["peak_per_parameter"]) == (0.5, pytest.approx(5e5), 7.0)
