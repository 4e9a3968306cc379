"""The dynamic program over levels in NumPy: this file defines what every other backend computes, choice for choice."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import Doubles, check_array

Steps: TypeAlias = npt.NDArray[np.int32]

NEVER: Final = (1 << 31) - 1
"""The number of steps that marks a choice that the layer does not have."""

MAX_CHOICES: Final = 1 << 16
"""The most choices of a layer, which are numbered in two bytes."""

MAX_REACH: Final = 1 << 24
"""The most steps above the least possible total that a row of the program covers."""


def cheapest(steps: Steps, costs: Doubles, chosen: Steps, *, budget: int) -> bool:
    """Writes each layer's choice for the least total cost within a budget of steps; returns False if none fits.

    See `program.cheapest` for arguments, ties and errors; `chosen` is written only if there is a solution.
    """
    _check(steps, costs, chosen, budget)
    layers = [_candidates(*rows) for rows in zip(steps, costs, strict=True)]
    if not all(len(layer.steps) for layer in layers):
        return False
    slack = budget - sum(int(layer.steps[0]) for layer in layers)
    if slack < 0:
        return False
    if sum(float(layer.costs[0]) for layer in layers) == np.inf:
        raise ValueError("the costs add up to more than a float64 holds")
    # Steps are counted from the least possible total: cell e of a row holds the least cost of e steps above it.
    layers = [_within(layer, slack) for layer in layers]
    if min(sum(int(layer.steps[-1]) for layer in layers), slack) > MAX_REACH:
        raise ValueError(f"the budget leaves more than {MAX_REACH} steps to choose from")

    row = np.zeros(1)
    taken = []
    for layer in layers:
        cells = min(len(row) - 1 + int(layer.steps[-1]), slack) + 1
        row, best = _relax(row, layer, cells)
        taken.append(best)

    cell = int(row.argmin())
    for i, layer in reversed(list(enumerate(layers))):
        candidate = int(taken[i][cell])
        chosen[i] = layer.numbers[candidate]
        cell -= int(layer.steps[candidate])
    return True


class _Candidates(NamedTuple):
    """The choices of a layer that can be part of the answer; they ascend in steps and descend in cost."""

    steps: npt.NDArray[np.int64]
    costs: Doubles
    numbers: npt.NDArray[np.intp]


def _candidates(steps: Steps, costs: Doubles) -> _Candidates:
    """Returns the choices that are cheaper than all others with as few steps, by ascending steps."""
    numbers = np.flatnonzero((steps != NEVER) & np.isfinite(costs))
    numbers = numbers[np.lexsort((costs[numbers], steps[numbers]))]
    before = np.minimum.accumulate(np.concatenate([[np.inf], costs[numbers]]))[:-1]
    numbers = numbers[costs[numbers] < before]
    return _Candidates(steps[numbers].astype(np.int64), costs[numbers], numbers)


def _within(layer: _Candidates, slack: int) -> _Candidates:
    """Returns the candidates of at most ``slack`` steps more than the first, with their steps above the first's."""
    more = layer.steps - layer.steps[0]
    return _Candidates(*(column[more <= slack] for column in (more, layer.costs, layer.numbers)))


def _relax(before: Doubles, layer: _Candidates, cells: int) -> tuple[Doubles, npt.NDArray[Any]]:
    """Returns after[e] = min over c of before[e - steps[c]] + costs[c], and the first c that attains it."""
    after = np.full(cells, np.inf)
    taken = np.zeros(cells, np.uint8 if len(layer.steps) <= 256 else np.uint16)
    for c, (step, cost) in enumerate(zip(layer.steps.tolist(), layer.costs.tolist(), strict=True)):
        part = slice(step, min(step + len(before), cells))
        total = before[: part.stop - step] + cost
        less = total < after[part]
        np.copyto(after[part], total, where=less)
        np.copyto(taken[part], c, where=less)
    return after, taken


def check_choices(name: str, array: Any, dtype: Any) -> None:
    """Raises TypeError for anything but a contiguous matrix of `dtype`."""
    if not (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.ndim == 2
        and array.flags.c_contiguous
        and array.flags.aligned
    ):
        raise TypeError(f"{name} must be a contiguous two-dimensional NumPy array of {np.dtype(dtype)}")


def _check(steps: Steps, costs: Doubles, chosen: Steps, budget: int) -> None:
    check_choices("steps", steps, np.int32)
    check_choices("costs", costs, np.float64)
    check_array("chosen", chosen, np.int32, writable=True)
    if costs.shape != steps.shape:
        raise ValueError("steps and costs do not have the same shape")
    if len(chosen) != len(steps):
        raise ValueError(f"chosen has {len(chosen)} items for {len(steps)} layers")
    if steps.shape[1] > MAX_CHOICES:
        raise ValueError(f"a layer has more than {MAX_CHOICES} choices")
    if budget < 0:
        raise ValueError(f"budget {budget} is negative")
    for condition, complaint in (
        ((steps >= 0).all(axis=1), "steps are negative"),
        ((costs >= 0).all(axis=1), "a cost is negative or not a number"),
    ):
        if not condition.all():
            raise ValueError(f"layer {int(np.argmin(condition))}: {complaint}")
