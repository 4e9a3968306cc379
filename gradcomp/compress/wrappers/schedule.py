"""Schedules choose another compressor in the first steps. Plans hold their choice, never the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compress.base import Compressor
from gradcomp.compress.checks import check_whole
from gradcomp.compress.identity import Identity
from gradcomp.compress.registry import register
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class Scheduled(Wrapper):
    """Base of the schedules: the compressor that they choose for a step is not wrapped in them."""

    def dense(self, exact: Compressor) -> Compressor:
        """Return the inner compressor's dense form, without a schedule."""
        return self.inner.dense(exact)


@register("warmup")
@dataclass(frozen=True)
class Warmup(Scheduled):
    """Exchange exactly for the first ``steps`` steps, then with ``inner``.

    Gradients change fast while training begins, and what is kept back then is soon out of date (Abrahamyan et al. 2021,
    section V-B). Momentum and clipping of ``inner`` act from the start. The change is a change of plan: all ranks make
    it at the same step.
    """

    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps", self.steps)

    def at_step(self, step: int) -> Compressor:
        """Return the dense form, then ``inner``, whose own schedule begins when the warm-up ends."""
        return self.inner.dense(Identity()) if step < self.steps else self.inner.at_step(step - self.steps)

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the end of the warm-up, and the later changes of ``inner``."""
        return (self.steps, *(self.steps + step for step in self.inner.changes))


@register("density_schedule")
@dataclass(frozen=True)
class DensitySchedule(Scheduled):
    """Lower the level of ``inner`` in equal intervals: ``levels[i]`` for ``steps_per_level`` steps each.

    ``inner``'s own level holds after the last interval, and where it is higher than ``levels[i]``. The default is the
    warm-up of Lin et al. 2018 from 25% down, with steps where they have epochs. A schedule inside counts the same
    steps; of two levels the higher one is used. The levels are meant as densities, but any compressor with a level will
    do.
    """

    levels: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    steps_per_level: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps_per_level", self.steps_per_level)
        if self.inner.traits.learns:
            raise ConfigError(
                f"{self.inner.to_string()} learns at one density, so density_schedule cannot change it"
            )
        if not isinstance(self.levels, tuple) or not self.levels:
            raise ConfigError(f"levels must be a tuple of levels, got {self.levels!r}")
        for level in self.levels:
            if not isinstance(level, int | float) or isinstance(self.inner.level, tuple):
                raise ConfigError(
                    f"levels must be a tuple of numbers around a compressor with one level, got {self.levels!r} around "
                    f"{self.inner.to_string()}"
                )
            self.inner.with_level(level)  # raises for an impossible one

    def at_step(self, step: int) -> Compressor:
        """Return the compressor of ``inner`` at this step, at the interval's level or its own, whichever is higher."""
        number = step // self.steps_per_level
        given = self.inner.at_step(step)
        own = given.level
        if own is None or number >= len(self.levels):  # a compressor without a level, as in a warm-up inside
            return given
        return given.with_level(max(self.levels[number], own))

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the end of every interval, and the changes of ``inner``."""
        ends = {self.steps_per_level * (i + 1) for i in range(len(self.levels))}
        return tuple(sorted(ends.union(self.inner.changes)))
