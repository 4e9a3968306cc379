"""Bounds on how far a code may be from its input decide whether error feedback around it is stable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec

#: This layer of 2**31 elements stands for all of them where none is known yet.
ANY_LAYER = LayerSpec("any", (1 << 15, 1 << 16))

#: The largest value of a quantisation bucket is at least its root mean square, so this multiple of it must survive.
_REACH = 1.0


@dataclass(frozen=True)
class Distortion:
    """Bound the error of a code C, for every input x.

        E||x - C(x)||^2 <= bound ||x||^2;   max |x - C(x)| <= peak max |x|, for every draw

    ``unbiased``: E C(x) = x. An unbiased code has the variance omega = bound; any code with a bound below 1 is a
    contraction with delta = 1 - bound. Feedback, e' = p - C(p) with p = g + e, keeps e bounded if ``bound`` or ``peak``
    is below 1: ||e|| <= 2 ||g|| / delta, or max |e| <= peak / (1 - peak) max |g|.

    ``dead``: values below ``dead`` times the root mean square of their quantisation bucket are rounded to zero.
    Rounding to nearest never increases the error (bound 1), but a bucket in which all values are that small is never
    sent.

    ``selects``: the code sends the largest elements, each by a code that is stable under feedback. An element whose
    residual grows is then sent sooner or later, and comes back smaller, whatever the sum of all errors is.
    """

    bound: float
    unbiased: bool = False
    peak: float = math.inf
    dead: float = 0.0
    selects: bool = False

    @property
    def delta(self) -> float:
        """Return delta of the contraction, or 0 if the code is not a contraction."""
        return max(1.0 - self.bound, 0.0)

    @property
    def omega(self) -> float:
        """Return the variance, or infinity if the code is biased."""
        return self.bound if self.unbiased else math.inf

    @property
    def freezes(self) -> bool:
        """Return whether most values might never be sent."""
        return self.dead > _REACH

    @property
    def bears_feedback(self) -> bool:
        """Return whether residuals stay bounded under error feedback."""
        bounded = self.bound < 1 or self.peak < 1 or (self.bound == 1 and self.dead > 0)
        return not self.freezes and (bounded or self.selects)


def worst_of(parts: Sequence[Distortion]) -> Distortion:
    """Return the bound that decides for a layer coded in parts: one that bears no feedback, or else the largest."""
    return min(parts, key=lambda part: (part.bears_feedback, -part.bound))


def check_feedback_around(name: str, distortion: Distortion | None, remedy: str = "") -> None:
    """Raise ConfigError, with the reason, for feedback around a code whose residual would grow. None: nothing is known.

    ``remedy``: advice that replaces the one that fits most compressors.
    """
    if distortion is None or distortion.bears_feedback:
        return
    if distortion.freezes:
        raise ConfigError(
            f"{name} may never send what it keeps back: values below {distortion.dead:.3g} times the root mean square "
            "of their quantisation bucket are rounded to zero, and a whole bucket may be that small. Use more bits, "
            "a smaller bucket_size, scaling=linf or rounding=stochastic"
        )
    if distortion.unbiased:
        lost = f"is unbiased with a variance omega of up to {distortion.omega:.3g}"
    else:
        lost = f"has a squared error of up to {distortion.bound:.3g}"
    if not remedy:
        finer = "more bits or a smaller bucket_size, if it has them"
        remedy = f"Use it without feedback, or with {finer}" if distortion.unbiased else f"Use {finer}"
    raise ConfigError(
        f"error feedback around {name} diverges: it {lost} times what it codes, and feedback needs less "
        f"than 1. {remedy}"
    )


def of_extremes(steps: int, elements: int, *, nearest: bool) -> Distortion:
    """Bound a code of even steps from the smallest of some elements to the largest, which are both exact.

    unit <= 2 max |x| / s, and unit^2 <= 2 ||x||^2 / s^2; the mean squared error of the others is at most unit^2 / 4.
    """
    bound = max(elements - 2, 0) / (2 * steps**2)
    return Distortion(bound, not nearest, (1 if nearest else 2) / steps)


def of_moved_extremes(steps: int, elements: int) -> Distortion:
    """Bound a code as in :func:`of_extremes` whose steps are moved by a random part of a step.

    Every error is uniform in half a unit either way, if there are two elements or more. The mean squared error of each
    is unit^2 / 12, with the same unit.
    """
    if elements < 2:
        return Distortion(0.0, True, 0.0)
    return Distortion(elements / (6 * steps**2), True, 1 / steps)


def of_levels(levels: Sequence[float], elements: int, *, nearest: bool) -> Distortion:
    """Bound a code of ascending levels in [0, 1], in units of the span of some elements, above the smallest one.

    With w the widest gap between levels, the variance is at most (w span)^2 / 4. To nearest, no error is above r span,
    where r is w / 2 or the gap at an end. span <= 2 max |x|, and span^2 <= 2 ||x||^2. Pinned ends are exact.
    """
    if elements < 2:
        return Distortion(0.0, not nearest, 0.0)
    widest = max(b - a for a, b in pairwise(levels))
    beyond = max(levels[0], 1.0 - levels[-1])
    reach = max(widest / 2, beyond)
    others = elements if beyond > 0 else elements - 2
    return Distortion(2 * others * reach**2, not nearest, 2 * (reach if nearest else widest))


def of_magnitudes(levels: Sequence[float], elements: int, *, l2: bool, nearest: bool) -> Distortion:
    """Bound a code of a sign and one of 0 and ascending levels up to 1, in units of a norm, l2 or linf.

    With r = |x_i| / norm between levels a and b, the variance is (r - a)(b - r) <= r^2 (b - a)^2 / 4ab; below the first
    level f it is r (f - r), in sum at most d f^2 / 4 and f sqrt(d). To nearest, no error is larger than r, and the
    largest element is exact under linf.
    """
    first = levels[0]
    widest = max(b - a for a, b in pairwise((0.0, *levels)))
    others = elements if l2 else elements - 1
    absolute = others * widest**2 / 4
    peak = widest * (math.sqrt(elements) if l2 else 1.0)
    if nearest:
        bound = min(absolute, 1.0 if l2 else 1.0 - 1.0 / max(elements, 1))
        return Distortion(bound, False, peak / 2, math.sqrt(elements) * first / 2 if l2 else 0.0)
    between = max(((b - a) ** 2 / (4 * a * b) for a, b in pairwise(levels)), default=0.0)
    below = min(others * first**2 / 4, first * math.sqrt(others) / (1 if l2 else 2))
    return Distortion(min(between + below, absolute), True, peak)


def of_drawn_sign(elements: int, *, l2: bool) -> Distortion:
    """Bound a code of plus or minus the norm, drawn at random: the variance is d norm^2 - ||x||^2."""
    return Distortion(max(elements - 1.0, 0.0), True, 1.0 + (math.sqrt(elements) if l2 else 1.0))


def of_mean_sign(elements: int) -> Distortion:
    """Bound a code of plus or minus the mean magnitude, or of the mean of either sign.

    It keeps ||x||_1^2 / d >= ||x||^2 / d of the energy.
    """
    return Distortion(1.0 - 1.0 / max(elements, 1), False, 1.0)
