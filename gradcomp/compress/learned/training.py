"""LGC trains on so few of its samples that training lengthens a step by little."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeVar

T = TypeVar("T")

#: With this setting ranks measure, and decide together.
AUTO: Final = "auto"
#: Every rank measures so many steps.
MEASURED: Final = 10
#: Training may take this part of the rest of a step, in the mean.
PART: Final = 0.05
_LEAST_SHARE = 1000


class Stopwatch:
    """Measure training against the rest of a step, on this rank. ``now``: a clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lessons: list[float] = []
        self._rests: list[float] = []
        self._ended: float | None = None

    def time(self, lesson: Callable[[], T]) -> T:
        """Return the result of ``lesson``, and measure it.

        The time between two lessons is the rest of a step.
        """
        began = self._now()
        if self._ended is not None:
            self._rests.append(began - self._ended)
        found = lesson()
        self._ended = self._now()
        self._lessons.append(self._ended - began)
        return found

    @property
    def part(self) -> float:
        """Return the median time of a lesson over that of the rest of a step; 0 until enough were measured."""
        if len(self._rests) < MEASURED:
            return 0.0
        return median(self._lessons) / max(median(self._rests), 1e-9)


def every(parts: Sequence[float]) -> int:
    """Return the m for which training on every m-th sample takes at most :data:`PART`, by the parts of all ranks.

    0 while a rank has not measured enough.
    """
    slowest = max(parts)
    if not all(part > 0 for part in parts) or not math.isfinite(slowest):
        return 0
    return min(max(math.ceil(slowest / PART), 1), _LEAST_SHARE)


def is_share(share: object) -> bool:
    """Return whether a setting is :data:`AUTO`, or 1/m for a whole number m."""
    if share == AUTO:
        return True
    if isinstance(share, bool) or not isinstance(share, int | float) or not 1 / _LEAST_SHARE <= share <= 1:
        return False
    return abs(share * round(1 / share) - 1) < 1e-3
