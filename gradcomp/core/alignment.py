"""Aligns the clocks of ranks by the messages that they sent to each other.

No message arrives before it was sent. If rank i waited for a message of rank j in a round that ended at e_i by i's
clock, and j issued its part of that round at b_j by its own, the offsets o that align both clocks obey

    o_j + b_j <= o_i + e_i.

The rounds of a few steps bound o_j - o_i from both sides, because messages go both ways, and bounds add up along a
chain of ranks (shortest paths). Clocks also differ in rate, so the window is cut into parts, and a rank's offset is a
line a + b t that lies between the bounds of all parts. All such lines form a polygon in (a, b). The line that is taken
lies in the middle of what they allow at both ends of the window, and its error is at most half the larger of the two
ranges. Ranks that read the same clock, as on one host, need no messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.timelines import RankTimeline, Round, RoundKey

Vector = npt.NDArray[np.floating]

#: Rounds of this many steps before and after a window bound the offsets too.
_MARGIN_STEPS = 50
_STEPS_OF_PART, _MOST_PARTS = 8, 64
#: Rates differ by less: a system corrects its clock by at most 500 parts in a million.
_MOST_DRIFT = 1e-3
#: The bounds are relaxed by this, doubled until some line lies between all of them, because drift bends the bounds of a
#: part a little. It is more than the rounding of times.
_SLACK_SECONDS = 1e-8


@dataclass(frozen=True)
class ClockFit:
    """Converts a rank's times: the first rank's clock reads t + offset + drift (t - middle) at the time t.

    ``error_seconds`` bounds the error of that within the window.
    """

    offset: float = 0.0
    drift: float = 0.0
    middle: float = 0.0
    error_seconds: float = 0.0

    def at(self, seconds: float) -> float:
        """Returns the time by the clock of the first rank."""
        return seconds + self.offset + self.drift * (seconds - self.middle)

    def after(self, earlier: ClockFit) -> ClockFit:
        """Returns the conversion by ``earlier`` and then by this one."""
        drift = (1 + self.drift) * (1 + earlier.drift) - 1
        middle = earlier.middle
        return ClockFit(self.at(earlier.at(middle)) - middle, drift, middle, self.error_seconds)


def align(timelines: Sequence[RankTimeline], first: int, last: int) -> list[ClockFit]:
    """Returns how the clock of each timeline is converted to that of the first, in the window of these steps.

    Raises ConfigError for a rank that exchanged no message with the others, and for times that contradict each other
    by more than clocks can differ in rate.
    """
    rounds = _matched([each.rounds(first - _MARGIN_STEPS, last + _MARGIN_STEPS) for each in timelines])
    fits = [ClockFit()] * len(timelines)
    for _ in range(2):  # the second time, drift no longer bends the bounds of a part
        recording = _Recording(timelines, rounds, fits)
        found = [recording.fit(i, first, last) for i in range(len(timelines))]
        fits = [new.after(old) for new, old in zip(found, fits, strict=True)]
    return fits


def _matched(rounds: Sequence[dict[RoundKey, Round]]) -> list[dict[RoundKey, Round]]:
    """Returns the rounds that several ranks have recorded; recordings may begin at different steps."""
    counts = Counter(key for each in rounds for key in each)
    return [{key: one for key, one in each.items() if counts[key] > 1} for each in rounds]


class _Recording:
    """Holds the rounds of all ranks, in times that ``fits`` have converted, and the bounds of offsets by part."""

    def __init__(
        self,
        timelines: Sequence[RankTimeline],
        rounds: Sequence[dict[RoundKey, Round]],
        fits: Sequence[ClockFit],
    ) -> None:
        self._timelines = timelines
        self._rounds = [
            {key: Round(fit.at(one.begin), fit.at(one.end), one.senders) for key, one in each.items()}
            for fit, each in zip(fits, rounds, strict=True)
        ]
        self._begins = [min((one.begin for one in each.values()), default=0.0) for each in self._rounds]
        ends = [max((one.end for one in each.values()), default=0.0) for each in self._rounds]
        steps = len({(exchange, step) for each in rounds for exchange, step, *_ in each})
        self._parts = min(max(steps // _STEPS_OF_PART, 1), _MOST_PARTS)
        length = max(end - begin for begin, end in zip(self._begins, ends, strict=True))
        self._part_seconds = max(length, 1e-9) / self._parts
        self._tolerance = _SLACK_SECONDS + _MOST_DRIFT * self._part_seconds
        self._bounds = self._by_messages()
        for part in range(self._parts):
            self._close(self._bounds[part])

    def _by_messages(self) -> Vector:
        """Returns the most that o_j - o_i can be, as [part, i, j]."""
        timelines, count = self._timelines, len(self._timelines)
        bounds = np.full((self._parts, count, count), np.inf)
        numbers = {timeline.rank: i for i, timeline in enumerate(timelines)}
        for i, each in enumerate(self._rounds):
            for key, one in each.items():
                part = min(int((one.end - self._begins[i]) / self._part_seconds), self._parts - 1)
                for sender in one.senders:
                    j = numbers.get(sender)
                    if j is not None and (sent := self._rounds[j].get(key)) is not None:
                        bounds[part, i, j] = min(bounds[part, i, j], one.end - sent.begin)
        for i in range(count):
            for j in range(count):
                if self._same_clock(i, j):
                    bounds[:, i, j] = np.minimum(bounds[:, i, j], 0.0)
        return bounds

    def _same_clock(self, i: int, j: int) -> bool:
        one, other = self._timelines[i].clock, self._timelines[j].clock
        return i == j or (one != "" and one == other)

    def _close(self, bounds: Vector) -> None:
        """Adds the bounds of a part up along chains of ranks, in place."""
        for k in range(len(bounds)):
            np.minimum(bounds, bounds[:, k : k + 1] + bounds[k : k + 1, :], out=bounds)
            worst = int(np.argmin(bounds.diagonal()))
            if bounds[worst, worst] < -self._tolerance:
                raise self._contradiction(worst, -bounds[worst, worst])
            np.fill_diagonal(bounds, 0.0)

    def _contradiction(self, i: int, seconds: float) -> ConfigError:
        return ConfigError(
            f"{self._timelines[i].path} contradicts the other files: messages would have arrived "
            f"{1e3 * seconds:.3f} ms before they were sent. The files are not of one run"
        )

    def fit(self, i: int, first: int, last: int) -> ClockFit:
        """Returns the conversion of rank i, whose error is bounded in these steps; ranks of one clock have one."""
        i = next(k for k in range(i + 1) if self._same_clock(k, i))
        if i == 0:
            return ClockFit()
        lower, upper = -self._bounds[:, i, 0], self._bounds[:, 0, i]
        known = np.isfinite(lower) & np.isfinite(upper)
        if not known.any():
            rank = self._timelines[i].rank
            raise ConfigError(
                f"rank {rank} exchanged no messages with the others in these steps, so its clock cannot be aligned"
            )
        ends = [one.end for (_, step, *_), one in self._rounds[i].items() if first <= step <= last]
        begin, end = min(ends, default=self._begins[i]), max(ends, default=self._begins[i])
        times = self._begins[i] + self._part_seconds * (np.arange(self._parts) + 0.5)[known]
        return self._middle_line(i, times, lower[known], upper[known], begin, end)

    def _middle_line(
        self, i: int, times: Vector, lower: Vector, upper: Vector, begin: float, end: float
    ) -> ClockFit:
        """Returns the line in the middle of those that lie between the bounds at ``times``."""
        middle, base = (begin + end) / 2, float(np.median(lower + upper)) / 2
        lower, upper, slack = lower - base, upper - base, _SLACK_SECONDS  # small numbers have small roundings
        while not len(corners := _corners(times - middle, lower - slack, upper + slack)):
            if slack > self._tolerance:
                raise self._contradiction(i, slack)
            slack *= 2
        half = max(end - begin, 1e-6) / 2
        at_ends = corners @ np.array([[1.0, 1.0], [-half, half]])
        low, high = at_ends.min(axis=0), at_ends.max(axis=0)
        (first, last), error = ((low + high) / 2).tolist(), float((high - low).max()) / 2
        return ClockFit(base + (first + last) / 2, (last - first) / (2 * half), middle, error)


def _corners(times: Vector, lower: Vector, upper: Vector) -> Vector:
    """Returns the corners (a, b) of the polygon of lines a + b t between the bounds; none if it is empty."""
    ones = np.ones_like(times)
    # Each row is an edge: normal (x, y) and limit, with a x + b y <= limit inside.
    normals = np.concatenate(
        [np.stack([ones, times], 1), np.stack([-ones, -times], 1), [[0.0, 1.0], [0.0, -1.0]]]
    )
    limits = np.concatenate([upper, -lower, [_MOST_DRIFT, _MOST_DRIFT]])
    first, second = np.triu_indices(len(limits), 1)
    (x, y), (u, v) = normals[first].T, normals[second].T
    determinant = x * v - y * u
    crossing = np.abs(determinant) > 1e-12
    first, second, determinant = first[crossing], second[crossing], determinant[crossing]
    (x, y), (u, v), p, q = normals[first].T, normals[second].T, limits[first], limits[second]
    points: Vector = np.stack([p * v - q * y, q * x - p * u], 1) / determinant[:, None]
    inside = (points @ normals.T <= limits + _SLACK_SECONDS / 10).all(axis=1)
    corners: Vector = points[inside]
    return corners
