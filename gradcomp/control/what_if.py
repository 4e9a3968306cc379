"""WhatIf runs ratios of fake compression in turn and prints how long steps take under each of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress.checks import check_whole, is_number
from gradcomp.compress.fake import Fake
from gradcomp.control.base import Controller, ControllerRun, Doubles, Environment, Step
from gradcomp.core.errors import ConfigError
from gradcomp.core.what_if import NOTHING, checked, shown

logger = logging.getLogger("gradcomp")

#: The first steps of a run allocate memory and fix the order of exchange buckets, and so do those after a change.
FIRST_STEPS = 6
WARMUP_STEPS = 3
#: A step within this fraction of the shortest one is as good: the knee is the least ratio that has one.
CLOSE = 0.05


@dataclass(frozen=True)
class Point:
    """Holds the seconds of all steps that count of one ratio, or of one pair, of the slowest rank in each.

    ``sent_bytes``: what one rank sends in a step, without headers.
    """

    label: str
    sent_bytes: float
    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.seconds, (25, 75)).tolist()
        return low, high


class Rounds:
    """The order in which variants are measured: in blocks of steps, A B C A B C, so that no drift favours one of them.

    ``seconds[i]``: the step times of variant i. A block's first steps do not count, nor does its last one, in which the
    next block is prepared.
    """

    def __init__(self, variants: int, block_steps: int, world: int, rank: int) -> None:
        self.variants, self.block_steps, self.world, self.rank = variants, block_steps, world, rank
        self.seconds: list[list[float]] = [[] for _ in range(variants)]
        #: The number of the first step of the first block; None: the next step decides.
        self.begun: int | None = None
        self._own = np.full(self.counted, np.nan)  # this rank's times of the last block

    @property
    def counted(self) -> int:
        """Return how many steps of a block count."""
        return self.block_steps - WARMUP_STEPS - 1

    def begin(self, step: int) -> None:
        """Begin the first block after the first steps of the run, if none has begun."""
        if self.begun is None:
            self.begun = step + FIRST_STEPS

    def variant(self, step: int) -> int:
        """Return the variant of a step."""
        return self._block(step)[0] % self.variants

    def _block(self, step: int) -> tuple[int, int]:
        """Return a step's block, and its place in it; the run's first steps belong to the first block."""
        since = 0 if self.begun is None else max(step - self.begun, 0)
        return divmod(since, self.block_steps)

    def took(self, step: int, seconds: float) -> None:
        """Take note of this rank's time of a step."""
        place = self._block(step)[1] - WARMUP_STEPS
        if self.begun is not None and step >= self.begun and 0 <= place < self.counted:
            self._own[place] = seconds if seconds > 0 else np.nan

    def ends_block(self, step: int) -> bool:
        """Return whether the step is the first after a block, whose times the ranks compare in it."""
        block, place = self._block(step)
        return block > 0 and place == 0

    def row(self) -> Doubles:
        """Return this rank's summand: its times of the last block in its own row, which is 0 on the other ranks."""
        table = np.zeros((self.world, self.counted))
        table[self.rank] = self._own
        self._own = np.full(self.counted, np.nan)
        return table.reshape(-1)

    def receive(self, step: int, sums: Doubles) -> bool:
        """Add the times of the slowest rank, step by step. Return whether 1, 2, 4, 8 ... rounds are complete."""
        slowest = sums.reshape(self.world, self.counted).max(axis=0)
        block = self._block(step)[0]
        self.seconds[(block - 1) % self.variants] += slowest[np.isfinite(slowest)].tolist()
        rounds, left = divmod(block, self.variants)
        return left == 0 and rounds & (rounds - 1) == 0 and all(self.seconds)


def knee(points: Sequence[Point]) -> Point:
    """Return the first point whose steps are about as short as the shortest; the last point is that of no network."""
    points = points[:-1] or points
    shortest = min(point.median for point in points)
    return next(point for point in points if point.median <= (1 + CLOSE) * shortest)


def curve(points: Sequence[Point], world: int) -> str:
    """Return the table of step times by ratio, with the knee; the last point costs the network nothing."""
    lines = [
        f"what-if, {world} ranks: step time by ratio (fake compression: training is worthless)",
        f"{'ratio':>8} {'MB sent':>9} {'step ms':>9} {'middle half':>17} {'steps':>6} {'of the first':>13}",
    ]
    first = points[0].median
    for point in points:
        low, high = (f"{1e3 * quartile:.1f}" for quartile in point.quartiles)
        lines.append(
            f"{point.label:>8} {point.sent_bytes / 1e6:9.3f} {1e3 * point.median:9.1f} {low + ' to ' + high:>17} "
            f"{len(point.seconds):6d} {point.median / first:12.0%} "
        )
    best, last = knee(points), points[-1]
    lines.append(
        f"knee: ratio {best.label}, {1e3 * best.median:.1f} ms: no further ratio is faster by more than {CLOSE:.0%}"
    )
    lines.append(
        f"left when the network costs nothing but latency (ratio {last.label}): {1e3 * last.median:.1f} ms"
    )
    return "\n".join(line.rstrip() for line in lines)


@dataclass
class WhatIfState:
    """The state of WhatIf: the ratios, and by ratio the bytes of a step and the step times."""

    ratios: list[float]
    sent_bytes: list[float]
    seconds: list[list[float]]


class WhatIfRun(ControllerRun):
    """Changes the ratio of all controlled layers block by block, and logs the curve on rank 0."""

    def __init__(self, controller: WhatIf, environment: Environment) -> None:
        super().__init__(controller.name, environment)
        ratios = sorted({*controller.ratios, NOTHING})
        self._fakes = [Fake(ratio, controller.codec_seconds) for ratio in ratios]
        self._sent = [0.0] * len(self._fakes)
        self._rounds = Rounds(len(self._fakes), controller.block_steps, environment.world, environment.rank)
        self._is_applied = False  # whether the plan in force is known to have the choice
        self._printed = 0  # the number of measured steps that the last curve showed
        self._choose(0)

    def _choose(self, number: int) -> None:
        self._current = number
        self.choices = dict.fromkeys(self.environment.controlled, self._fakes[number])

    @property
    def notable(self) -> bool:
        """Return false: the curve says more than a line for every block."""
        return False

    @property
    def points(self) -> list[Point]:
        """Return what was measured so far, by ratio; the same on all ranks."""
        rows = zip(self._fakes, self._sent, self._rounds.seconds, strict=True)
        return [Point(shown(fake.ratio), sent, seconds) for fake, sent, seconds in rows]

    def begin(self, step: int) -> None:
        self._rounds.begin(step)

    def contribution(self, step: int) -> Doubles | None:
        """Return this rank's times of the last block in the first step after it."""
        return self._rounds.row() if self._rounds.ends_block(step) else None

    def finish(self, step: Step) -> bool:
        """Note the time of the step before, and change the ratio where a block ends."""
        rounds, number = self._rounds, step.number
        self._sent[self._current] = step.predicted
        if rounds.ends_block(number):
            assert step.sums is not None, "all ranks contributed"
            if rounds.receive(number, step.sums):
                self._print()
        rounds.took(number - 1, step.seconds)
        following = rounds.variant(number + 1)
        if following == self._current and self._is_applied:
            return False
        self._is_applied = True  # a checkpoint may have brought another plan
        self._choose(following)
        self.reason = f"ratio {shown(self._fakes[following].ratio)}"
        return True

    def _print(self) -> None:
        self._printed = sum(map(len, self._rounds.seconds))
        if self.environment.rank == 0:
            logger.info(curve(self.points, self.environment.world))

    def close(self) -> None:
        """Log the last curve, unless it was logged; say so if the run was too short for one."""
        rounds = self._rounds
        if all(rounds.seconds):
            if sum(map(len, rounds.seconds)) > self._printed:
                self._print()
        elif self.environment.rank == 0:
            steps = FIRST_STEPS + rounds.variants * rounds.block_steps + 1
            logger.warning(
                "what-if: the run has ended before every ratio was measured; that takes %d steps", steps
            )

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> WhatIfState:
        return WhatIfState([fake.ratio for fake in self._fakes], self._sent, self._rounds.seconds)

    def adopt(self, saved: WhatIfState, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin a new round, after the times of earlier ones if they are of the same ratios."""
        rounds = self._rounds
        self._rounds = Rounds(rounds.variants, rounds.block_steps, rounds.world, rounds.rank)
        if (
            saved.ratios == self.state.ratios
            and len(saved.seconds) == len(saved.sent_bytes) == rounds.variants
        ):
            self._sent, self._rounds.seconds = list(saved.sent_bytes), [list(one) for one in saved.seconds]
        self._choose(0)


@dataclass(frozen=True)
class WhatIf(Controller):
    """Runs ratios of :class:`gradcomp.Fake` in turn and logs the curve of step time against ratio.

    Training is worthless meanwhile. The ratios are run in blocks of ``block_steps`` steps, A B C A B C. A block's first
    3 steps do not count, nor does its last one, nor do the first 6 steps of the run. The ratio 2**30, at which the
    network costs nothing but latency, is always the last one. Rank 0 logs the curve after 1, 2, 4, 8, ... rounds, and
    at the end of the run; ``GRADCOMP_WHAT_IF`` sets this controller for every wrapper.

    A step time is the time from the opening of a step to that of the next one, on the slowest rank in that step, and a
    figure is the median over steps. The knee is the least ratio whose figure is within 5% of the shortest, 2**30 apart.

    Args:
        ratios: the ratios, in [1, 2**30]; they are sorted.
        codec_seconds: as for :class:`gradcomp.Fake`.
        block_steps: steps of a block, at least 5.

    Wire: one sum over ranks of N (block_steps - 4) float64 for each block.

    State: the step times. A run that continues begins a new round.

    Errors: ConfigError for ratios that are outside of [1, 2**30], repeated, or more than 16, and for fewer steps.

    Source: Markov 2024, section 3.3.1 and Figure 3.1.
    """

    name: ClassVar[str] = "what_if"

    ratios: Sequence[float] = (1, 2, 4, 8, 16)
    codec_seconds: float = 0.0
    block_steps: int = 10

    def __post_init__(self) -> None:
        given: list[Any] = [*self.ratios] if isinstance(self.ratios, tuple | list) else [self.ratios]
        if not all(map(is_number, given)):
            raise ConfigError(f"ratios must be numbers, got {self.ratios!r}")
        object.__setattr__(self, "ratios", checked(given, self.name))
        check_whole("block_steps", self.block_steps, WARMUP_STEPS + 2)
        Fake(codec_seconds=self.codec_seconds)

    def begin(self, environment: Environment) -> ControllerRun:
        return WhatIfRun(self, environment)
