"""Chooses a level for every layer by the dynamic program of L-GreCo.

Row l of a matrix is a layer, column k one of its choices: a compressor and a level, or whatever else the caller
numbers. `discretise` turns errors into whole steps, `cheapest` finds the choices of least cost within a budget of
steps. Neither puts anything on the wire or keeps state; all backends of the kernels choose the same.

Source: Markov et al. 2024, Algorithm 1, lines 3 and 5 (`discretise`) and 6-31 (`cheapest`).
"""

from __future__ import annotations

import math
import operator
import sys

import numpy as np

from gradcomp.kernels.dispatch import HOST_KERNELS
from gradcomp.kernels.reference_program import MAX_CHOICES, MAX_REACH, NEVER, Steps, check_choices
from gradcomp.kernels.segments import Doubles, check_array

__all__ = ["MAX_CHOICES", "MAX_REACH", "NEVER", "cheapest", "discretise", "step_size"]

_STEP_BITS = 22


def discretise(errors: Doubles, reference: Doubles, buckets: int, alpha: float = 1.0) -> tuple[Steps, int]:
    """Returns errors as whole steps, rounded up, and the budget: the steps of the reference's errors.

        steps(x) = max(1, ceil(x / d)),    d = step_size(reference, buckets, alpha)
        budget = sum over layers of steps(alpha reference[l])

    These hold exactly but for the rounding of the products alpha reference[l]: choices of at most `budget` steps in
    total have errors of at most budget d in total, and budget d <= alpha sum(reference) + L d. A choice whose error is
    at most alpha reference[l] takes no more steps than the budget contains for its layer, so that for alpha >= 1 the
    reference itself always fits.

    Markov et al. also round up with a minimum of 1, but allow a total of `buckets` steps: with many layers the
    reference then exceeds its own budget. We round scaled errors instead of scaling a sum of rounded ones, which
    bounds the slack by one step a layer for every alpha.

    Args:
        errors: float64, shape (L, K), not negative: the error of each choice; infinite where the layer lacks it.
        reference: float64, shape (L,), not negative, finite: the error of the reference's choice, in the same units.
        buckets: D, in 1 .. 2**24; steps that the allowed error is divided into.
        alpha: positive; factor of the allowed error.

    Returns:
        int32, shape (L, K): steps of each choice, `NEVER` for those that do not exist or could fit no budget.
        The budget, in steps; at most buckets + L.

    Raises:
        TypeError: an array of another dtype or shape, or not contiguous.
        ValueError: a number out of range, another number of layers, or reference errors whose sum is zero.
    """
    check_choices("errors", errors, np.float64)
    d = step_size(reference, buckets, alpha)
    if len(errors) != len(reference):
        raise ValueError(f"errors has {len(errors)} rows for {len(reference)} layers")
    if not (errors >= 0).all():
        raise ValueError("an error is negative or not a number")
    return _steps(errors, d), int(_steps(alpha * reference, d).sum(dtype=np.int64))


def step_size(reference: Doubles, buckets: int, alpha: float = 1.0) -> float:
    """Returns the error of one step: alpha sum(reference) / buckets, rounded up to 22 significant bits.

    With these few bits the product of a number of steps and the step size is exact, as the bounds of `discretise`
    require.

    Args:
        reference: float64, shape (L,), not negative, finite.
        buckets: D, in 1 .. 2**24.
        alpha: positive.

    Raises:
        TypeError: an array of another dtype or shape, or not contiguous.
        ValueError: a number out of range, or reference errors whose sum is zero.
    """
    check_array("reference", reference, np.float64)
    if not 1 <= operator.index(buckets) <= MAX_REACH:
        raise ValueError(f"buckets {buckets} is not in 1..{MAX_REACH}")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha {alpha} is not positive and finite")
    if not ((reference >= 0) & (reference < np.inf)).all():
        raise ValueError("a reference error is negative or not finite")
    try:
        with np.errstate(over="ignore"):
            total = math.fsum(alpha * reference)  # exactly rounded: the same on every CPU
        mantissa, exponent = math.frexp(total / buckets)
        d = math.ldexp(math.ceil(math.ldexp(mantissa, _STEP_BITS)), exponent - _STEP_BITS)
    except OverflowError:
        raise ValueError("the reference errors add up to more than a float64 holds") from None
    if d < sys.float_info.min:
        raise ValueError("the reference errors add up to nothing")
    return d


def _steps(errors: Doubles, d: float) -> Steps:
    """Returns max(1, ceil(errors / d)) of the exact quotients."""
    with np.errstate(over="ignore"):
        steps = np.ceil(errors / d)
        # The quotient may have been rounded down to a whole number.
        steps += steps * d < errors
    return np.clip(steps, 1, NEVER).astype(np.int32)


def cheapest(steps: Steps, costs: Doubles, budget: int) -> Steps | None:
    """Returns the choices of least total cost whose steps add up to at most the budget; None if no choices do.

        C_0(0) = 0;    C_l(e) = min over k of C_{l-1}(e - steps[l, k]) + costs[l, k]

    e is the smallest with the least C_L(e) among 0 .. budget. Each sum is rounded to float64, in the layers' order.

    Ties: among equal total costs the fewest total steps win; then the fewest steps of the last layer, of the one
    before it, and so on. Among one layer's choices with equal steps the cheaper one wins, and then the first. (Line 10
    of the paper takes the last of them, and line 25 has no rule.)

    Choices that cost no less than one of the same layer with as few steps are left out, and so are sums of steps out
    of reach; neither changes the answer. Time: L K (S + 1) additions at most, where S is what the budget leaves above
    the layers' least steps. Memory: L (S + 1) bytes, twice that if a layer has more than 256 choices that matter, and
    two rows of S + 1 float64.

    Args:
        steps: int32, shape (L, K), not negative; `NEVER`: the layer does not have that choice.
        costs: float64, shape (L, K), not negative; bytes, seconds, or another quantity to minimise. Infinite: the layer
            does not have that choice.
        budget: steps, not negative, 63 bits.

    Returns:
        int32, shape (L,): the column of each layer's choice. None if no choices fit the budget, or a layer has none.

    Raises:
        TypeError: an array of another dtype or shape, or not contiguous.
        ValueError: a number out of range, different shapes, more than 2**16 choices, costs that add up to more than a
            float64 holds, or a budget that leaves more than 2**24 steps to choose from.
    """
    check_choices("steps", steps, np.int32)
    chosen = np.empty(len(steps), np.int32)
    found = HOST_KERNELS.cheapest(steps, costs, chosen, budget=operator.index(budget))
    return chosen if found else None
