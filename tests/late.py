"""Background work that takes its time."""

from __future__ import annotations

import random
from concurrent.futures import Future

from gradcomp.control.base import at_once


class Late:
    """A background whose work is done after a random number of looks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, work):
        looks, result = [self.random.randrange(12)], Future()
        result.set_result(work())
        future = Future()
        future.done = lambda: looks.append(looks.pop() - 1) or looks[0] < 0
        future.result = result.result
        future.exception = result.exception
        return future


class After:
    """A background whose work is done at once, and counts as done after so many steps; tests set ``step``."""

    def __init__(self, steps: float) -> None:
        self.step, self.steps = 0, steps

    def __call__(self, work):
        future, due = at_once(work), self.step + self.steps
        future.done = lambda: self.step >= due
        return future
