"""Errors as whole steps: what the dynamic program may promise about the true errors."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from tiers import every_value

from gradcomp.kernels import program
from gradcomp.kernels.program import NEVER


@pytest.mark.parametrize(("alpha", "scale"), every_value(product([1.0, 0.3, 2.0], [1.0, 1e-300, 1e300])))
def test_the_true_error_is_never_exceeded(alpha: float, scale: float) -> None:
    """In exact arithmetic: errors <= budget * step size <= alpha * reference + one step per layer."""
    rng = np.random.default_rng(7)
    for layers, buckets in ((1, 1), (5, 10), (161, 1000), (161, 10_000), (30, 1 << 24)):
        errors = scale * rng.lognormal(0, 3, (layers, 5))
        errors[rng.random(errors.shape) < 0.1] = 0.0
        reference = errors[:, 2].copy()
        reference[0] = scale
        steps, budget = program.discretise(errors, reference, buckets, alpha)
        d = Fraction(program.step_size(reference, buckets, alpha))
        exact = [[max(1, math.ceil(Fraction(e) / d)) for e in row] for row in errors]
        assert steps.tolist() == [[min(n, NEVER) for n in row] for row in exact]
        assert budget * d <= sum(Fraction(r) for r in alpha * reference) + layers * d
        assert budget <= buckets + layers
        found = program.cheapest(steps, rng.random(errors.shape), budget)
        if alpha >= 1:
            assert found is not None
        if found is not None:
            assert sum(Fraction(errors[i, k]) for i, k in enumerate(found)) <= budget * d


def test_quotients_that_round_to_whole_numbers_are_rounded_up() -> None:
    d = program.step_size(np.array([1.0]), 10_000)
    whole = d * np.arange(1, 5001)
    above = np.nextafter(whole, 2)
    steps, _ = program.discretise(np.array([whole, above]), np.array([1.0, 0.0]), 10_000)
    assert steps[0].tolist() == list(range(1, 5001))
    assert steps[1].tolist() == list(range(2, 5002))


def test_every_choice_takes_a_step() -> None:
    steps, budget = program.discretise(np.array([[0.0, 1e-9], [1.0, 0.0]]), np.array([0.0, 1.0]), 4)
    assert steps.tolist() == [[1, 1], [4, 1]]
    assert budget == 5


def test_the_reference_needs_more_than_the_authors_budget() -> None:
    reference = np.random.default_rng(0).random(161)
    steps, budget = program.discretise(reference[:, None].copy(), reference, 10_000)
    assert steps.sum() == budget
    assert 10_000 < budget <= 10_161


def test_a_missing_choice_is_never_taken() -> None:
    steps, budget = program.discretise(np.array([[np.inf, 1.0, 1e300]]), np.array([1.0]), 10)
    assert steps.tolist() == [[NEVER, 10, NEVER]]
    assert program.cheapest(steps, np.array([[0.0, 5.0, 0.0]]), budget).tolist() == [1]  # type: ignore[union-attr]


def test_alpha_scales_the_budget() -> None:
    errors = np.array([[4.0, 2.0, 1.0]] * 3)
    reference = errors[:, 1].copy()
    for alpha, total_steps in ((0.5, 6), (1.0, 12), (2.0, 24)):
        steps, budget = program.discretise(errors, reference, 6 * 1000, alpha)
        d = program.step_size(reference, 6 * 1000, alpha)
        assert budget * d == pytest.approx(total_steps / 2, rel=1e-3)
        assert program.cheapest(steps, 1 / errors, budget).tolist() == [int(math.log2(2 / alpha))] * 3  # type: ignore[union-attr]


GOOD: dict[str, Any] = {"errors": np.ones((2, 3)), "reference": np.ones(2), "buckets": 10, "alpha": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("errors", np.full((2, 3), np.nan), "an error is negative or not a number"),
        ("errors", np.full((2, 3), -1.0), "an error is negative or not a number"),
        ("errors", np.ones((3, 3)), "errors has 3 rows for 2 layers"),
        ("reference", np.zeros(2), "the reference errors add up to nothing"),
        ("reference", np.zeros(0), "the reference errors add up to nothing"),
        ("reference", np.full(2, 5e-324), "the reference errors add up to nothing"),
        ("reference", np.full(2, 1.7e308), "add up to more than a float64 holds"),
        ("reference", np.array([1.0, np.nan]), "a reference error is negative or not finite"),
        ("reference", np.array([1.0, np.inf]), "a reference error is negative or not finite"),
        ("reference", np.array([1.0, -1.0]), "a reference error is negative or not finite"),
        ("buckets", 0, "buckets 0 is not in"),
        ("buckets", program.MAX_REACH + 1, "is not in 1"),
        ("alpha", 0.0, "alpha 0.0 is not positive"),
        ("alpha", math.inf, "alpha inf is not positive"),
        ("alpha", math.nan, "alpha nan is not positive"),
        ("alpha", 1e308, None),
    ],
)
def test_errors_out_of_range(name: str, value: Any, complaint: str | None) -> None:
    arguments = GOOD | {name: value}
    if complaint is None:
        arguments["reference"] = np.full(2, 10.0)
    with pytest.raises(ValueError, match=complaint or "more than a float64 holds"):
        program.discretise(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("errors", np.ones((2, 3), np.float32)),
        ("errors", np.ones(2)),
        ("errors", np.ones((3, 2)).T),
        ("errors", [[1.0]]),
        ("reference", np.ones(2, np.float32)),
        ("reference", np.ones((2, 1))),
        ("reference", [1.0, 1.0]),
        ("buckets", 10.0),
        ("alpha", None),
    ],
)
def test_errors_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        program.discretise(**(GOOD | {name: value}))
