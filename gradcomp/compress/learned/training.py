"""On how many of its samples LGC trains, so that training lengthens a step by little."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeVar

T = TypeVar("T")

#: The setting that lets ranks measure, and decide together.
AUTO: Final = "auto"
#: Steps that every rank measures.
MEASURED: Final = 10
#: The part of a step that training may take beside the rest of it, in the mean.
PART: Final = 0.05
_LEAST_SHARE = 1000


class Stopwatch:
    """What training takes beside the rest of a step, on this rank. ``now``: a clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lessons: list[float] = []
        self._rests: list[float] = []
        self._ended: float | None = None

    def time(self, lesson: Callable[[], T]) -> T:
        """What the lesson gives. Behind the last one, until this one began, was the rest of a step."""
        began = self._now()
        if self._ended is not None:
            self._rests.append(began - self._ended)
        found = lesson()
        self._ended = self._now()
        self._lessons.append(self._ended - began)
        return found

    @property
    def part(self) -> float:
        """Median time of a lesson over that of the rest of a step; 0 until enough were measured."""
        if len(self._rests) < MEASURED:
            return 0.0
        return median(self._lessons) / max(median(self._rests), 1e-9)


def every(parts: Sequence[float]) -> int:
    """The m for which training on every m-th sample takes at most :data:`PART`, by the parts of all ranks.

    0 while a rank has not measured enough.
    """
    slowest = max(parts)
    if not all(part > 0 for part in parts) or not math.isfinite(slowest):
        return 0
    return min(max(math.ceil(slowest / PART), 1), _LEAST_SHARE)


def is_share(share: object) -> bool:
    """Whether it is :data:`AUTO`, or 1/m for a whole number m."""
    if share == AUTO:
        return True
    if isinstance(share, bool) or not isinstance(share, int | float) or not 1 / _LEAST_SHARE <= share <= 1:
        return False
    return abs(share * round(1 / share) - 1) < 1e-3
