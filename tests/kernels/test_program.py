"""The dynamic program over levels: against brute force, backend against backend, and its promises one by one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels.isas import instruction_set

from gradcomp.kernels import dispatch, program
from gradcomp.kernels.program import NEVER

extension = pytest.importorskip("gradcomp._native")


@pytest.fixture(autouse=True, params=["reference", *extension.available_isas()])
def backend(request: Any) -> Iterator[None]:
    """Runs a test once per backend of the kernels."""
    if request.param == "reference":
        with dispatch.use("reference"):
            yield
    else:
        with instruction_set(request.param), dispatch.use("native"):
            yield


def matrix(rows: Any, dtype: Any) -> Any:
    return np.array(rows, dtype, ndmin=2)


def cheapest(steps: Any, costs: Any, budget: int) -> list[int] | None:
    found = program.cheapest(matrix(steps, np.int32), matrix(costs, np.float64), budget)
    return None if found is None else found.tolist()


def brute_force(steps: Any, costs: Any, budget: int) -> list[int] | None:
    """The definition by enumeration: least cost, fewest steps, fewest steps of the last layer, ...; lowest columns."""
    best = None
    for columns in itertools.product(range(steps.shape[1]), repeat=len(steps)):
        taken = [int(s[k]) for s, k in zip(steps, columns, strict=True)]
        cost = sum(c[k] for c, k in zip(costs, columns, strict=True))
        if NEVER in taken or math.isinf(cost) or sum(taken) > budget:
            continue
        key = (cost, sum(taken), taken[::-1], columns[::-1])
        best = key if best is None or key < best else best
    return None if best is None else list(best[-1][::-1])


def small_problem(rng: Any) -> tuple[Any, Any, int]:
    """Few distinct numbers, so that much is tied; costs whose sums are exact."""
    shape = (rng.integers(1, 5), rng.integers(1, 5))
    steps = rng.integers(0, rng.choice([2, 4, 9]), shape).astype(np.int32)
    costs = rng.integers(0, rng.choice([2, 4, 20]), shape).astype(np.float64)
    steps[rng.random(shape) < 0.15] = NEVER
    costs[rng.random(shape) < 0.1] = np.inf
    return steps, costs, int(rng.integers(0, 12))


def large_problem(seed: int, layers: int, choices: int, buckets: int) -> tuple[Any, Any, int]:
    """Steps, costs and budget of layers of all sizes, with columns out of order and some missing."""
    rng = np.random.default_rng(seed)
    level = rng.permuted(np.tile(np.linspace(0.02, 1.0, choices), (layers, 1)), axis=1)
    errors = rng.lognormal(0, 1, (layers, 1)) * (1.02 - level) ** 2
    costs = rng.lognormal(10, 2, (layers, 1)) * level
    reference = errors[:, choices // 2].copy()
    errors[rng.random(errors.shape) < 0.1] = np.inf
    steps, budget = program.discretise(errors, reference, buckets)
    return steps, costs, budget


def test_equal_to_brute_force() -> None:
    rng = np.random.default_rng(0)
    nothing = 0
    for _ in range(1500):
        steps, costs, budget = small_problem(rng)
        expected = brute_force(steps, costs, budget)
        assert cheapest(steps, costs, budget) == expected, (steps, costs, budget)
        nothing += expected is None
    assert 100 < nothing < 1000  # both kinds of answer were asked for


def test_no_sum_of_rounded_costs_is_less() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        steps = rng.integers(0, 5, (4, 3)).astype(np.int32)
        costs = rng.random((4, 3)) * 10.0 ** rng.integers(-17, 3, (4, 3))
        found = cheapest(steps, costs, 8)
        best = brute_force(steps, costs, 8)
        if best is None:
            assert found is None
        else:
            assert found is not None
            assert total(costs, found) == total(costs, best)


def total(numbers: Any, columns: Any) -> Any:
    """The sum over layers, in order."""
    return sum(numbers[i, k].item() for i, k in enumerate(columns))


SHAPES = [
    (1, 1, 1),
    (3, 300, 1000),  # more choices than a byte numbers
    (40, 31, 37),
    (25, 31, 10_000),
    (100, 2, 4097),
    (7, 64, 31),
]


@functools.cache
def sweep() -> list[tuple[Any, Any, int, list[int] | None]]:
    """Problems and what the reference answers: all costs different, or most tied; much of the budget, or little."""
    problems = []
    for shape, seed in itertools.product(SHAPES, range(6)):
        steps, costs, budget = large_problem(seed, *shape)
        for tied in (costs, np.floor(costs / costs.max() * 8)):
            for part in (budget, budget // 2, len(steps), len(steps) + 17):
                with dispatch.use("reference"):
                    problems.append((steps, tied, part, cheapest(steps, tied, part)))
    return problems


def test_equal_to_the_reference() -> None:
    for steps, costs, budget, expected in sweep():
        assert cheapest(steps, costs, budget) == expected


def test_all_choices_of_a_layer_can_be_taken() -> None:
    # 256 candidates fit into a byte, 257 do not.
    for choices in (255, 256, 257, 1000):
        steps = np.arange(choices, dtype=np.int32)[None]
        costs = np.arange(choices, 0, -1, dtype=np.float64)[None]
        for wanted in {0, 1, 254, 255, choices // 2, choices - 1} & set(range(choices)):
            assert cheapest(steps, costs, wanted) == [wanted]
            assert (
                cheapest(np.vstack([steps] * 3), np.vstack([costs] * 3), 3 * (choices - 1))
                == [choices - 1] * 3
            )


def test_the_budget_is_kept_and_more_budget_never_costs_more() -> None:
    steps, costs, budget = large_problem(3, 30, 12, 500)
    least = int(np.where(steps == NEVER, 10**6, steps).min(axis=1).sum())
    assert cheapest(steps, costs, least - 1) is None
    previous = math.inf
    for part in range(least, budget + 200, 3):
        found = cheapest(steps, costs, part)
        assert found is not None
        assert total(steps, found) <= part
        assert total(costs, found) <= previous
        previous = total(costs, found)
    assert cheapest(steps, costs, 2**62) == np.where(steps == NEVER, np.inf, costs).argmin(axis=1).tolist()


@pytest.mark.parametrize("alpha", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("buckets", [1, 100, 10_000])
def test_never_worse_than_the_reference(alpha: float, buckets: int) -> None:
    rng = np.random.default_rng(buckets)
    for _ in range(10):
        errors, costs = rng.random((20, 6)), rng.random((20, 6))
        column = rng.integers(0, 6)
        steps, budget = program.discretise(errors, errors[:, column].copy(), buckets, alpha)
        found = cheapest(steps, costs, budget)
        assert found is not None
        assert total(costs, found) <= total(costs, [column] * 20)


def test_ties() -> None:
    # Equal cost: the fewer steps in total.
    assert cheapest([[3, 2], [4, 1]], [[5, 5], [6, 6]], 9) == [1, 1]
    # Equal cost and equal steps in total: the fewer steps of the last layer.
    assert cheapest([[1, 2], [1, 2]], [[9, 4], [9, 4]], 3) == [1, 0]
    assert cheapest([[1, 2, 3]] * 3, [[9, 6, 3]] * 3, 6) == [2, 1, 0]
    # Equal steps: the cheaper one, wherever it stands; then the first.
    assert cheapest([[1, 1, 1, 1]], [[7, 3, 3, 8]], 1) == [1]
    assert cheapest([[1, 1, 0]], [[3, 3, 3]], 1) == [2]


def test_nothing_fits() -> None:
    assert cheapest([[1], [1]], [[1], [1]], 1) is None
    assert cheapest([[1], [NEVER]], [[1], [1]], 2**62) is None  # no budget is large enough
    assert cheapest([[1], [1]], [[1], [np.inf]], 9) is None
    assert program.cheapest(np.zeros((2, 0), np.int32), np.zeros((2, 0)), 9) is None


def test_smallest_problems() -> None:
    assert cheapest([[0]], [[0]], 0) == [0]
    assert cheapest([[5]], [[3]], 5) == [0]
    assert cheapest([[5]], [[3]], 4) is None
    assert cheapest([[0, 1]], [[2, 1]], 0) == [0]
    assert cheapest([[0, 1]], [[2, 1]], 2**62) == [1]
    assert cheapest([[NEVER - 1, NEVER]], [[2, 1]], 2**62) == [0]
    assert program.cheapest(np.zeros((0, 3), np.int32), np.zeros((0, 3)), 0).tolist() == []  # type: ignore[union-attr]


def test_a_budget_is_a_whole_number() -> None:
    with pytest.raises(TypeError):
        program.cheapest(np.ones((2, 3), np.int32), np.ones((2, 3)), 9.0)  # type: ignore[arg-type]


def test_read_only_sources_are_read() -> None:
    steps, costs = np.ones((2, 3), np.int32), np.ones((2, 3))
    steps.flags.writeable = costs.flags.writeable = False
    assert cheapest(steps, costs, 2) == [0, 0]
    found = program.cheapest(steps, costs, 2)
    assert found is not None
    assert found.dtype == np.int32
