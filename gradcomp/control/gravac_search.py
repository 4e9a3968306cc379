"""Algorithm 1 of Tyagi and Swany 2023 (GraVAC) without the training: from gains and seconds to the next factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace

import numpy as np

from gradcomp.control.base import Doubles, Numbers

#: The index of the factor 1.
DENSE = 0


@dataclass
class RowState:
    """The saved state of a row. ``timed`` has the factors that the window's steps sent.

    ``factors`` has for each factor its value, the number of steps that sent it, the decaying sums whose quotient is its
    gain, and T.
    """

    minimum: float
    candidate: float
    sent: float
    timed: list[float]
    factors: list[tuple[float, int, float, float, float | None]]

    @property
    def values(self) -> set[float]:
        """Returns every factor that the state names."""
        return {self.minimum, self.candidate, self.sent, *self.timed, *(one[0] for one in self.factors)}

    def without_gains(self) -> RowState:
        """Returns the state without measured gains; counts stay."""
        return replace(self, factors=[(factor, steps, 0.0, 0.0, None) for factor, steps, *_ in self.factors])


@dataclass
class SearchState:
    """The saved state of a search."""

    taken: int
    seconds: list[float]
    rows: dict[str, RowState]


@dataclass(eq=False)
class Search:
    """Independent searches, one per row: a row is the model, or one of its layers.

    ``factors``: ascending, 1 first; rows hold indices of factors. ``first``: the index of the minimum factor.
    ``of_averages``: gains are quotients of two averages, otherwise averages of quotients of at most 1. Attributes:
    ``minimum`` and ``candidate`` are theta_min and theta_c; ``sent`` is the factor that the next step sends;
    ``steps[row, k]`` counts the steps that sent factor k; ``throughput[row, k]`` is T, NaN if not known.
    """

    factors: tuple[float, ...]
    first: InitVar[int]
    world: int
    rows: InitVar[int]
    epsilon: float
    window: int
    omega: float
    of_averages: bool

    def __post_init__(self, first: int, rows: int) -> None:
        self.minimum: Numbers = np.full(rows, first, dtype=np.int64)
        self.candidate: Numbers = self.minimum.copy()
        self.sent: Numbers = np.full(rows, DENSE, dtype=np.int64)
        shape = (rows, len(self.factors))
        self.steps: Numbers = np.zeros(shape, dtype=np.int64)
        self.throughput: Doubles = np.full(shape, np.nan)
        self.taken = 0  # steps that counted
        # delta = sums / weights; both decay, so that the mean of few samples has no bias towards its initial 0. Of
        # averages, weights are the norms of only those steps in which the factor was measured, since norms fall in
        # training.
        self._sums: Doubles = np.zeros(shape)
        self._weights: Doubles = np.zeros(shape)
        self._seconds: list[float] = []  # seconds of the window's iterations
        self._timed: list[Numbers] = []  # factors that these iterations sent

    @property
    def gains(self) -> Doubles:
        """Returns delta by row and factor; NaN if it was never measured."""
        gains = np.full(self._sums.shape, np.nan)
        np.divide(self._sums, self._weights, out=gains, where=self._weights > 0)
        gains[:, DENSE] = 1.0
        return gains

    def time(self, seconds: float, sent: Numbers) -> None:
        """Records the ``seconds``, averaged over ranks, of an iteration that sent the factors ``sent``."""
        self._seconds.append(seconds)
        self._timed.append(sent)

    def step(self, total: Doubles, kept: Doubles, kept_by_candidate: Doubles) -> bool:
        """Ends a step (lines 6 to 9, 27). Returns true if a window ended.

        The arguments are sums over ranks by row, as the form of the gain compares them: of what stands below the line,
        and of both selections above it. Afterwards ``sent`` has the factors of the next step (lines 11 to 25).
        Nothing happens unless all are finite; a row whose sums are 0 has no gain.
        """
        if not all(np.isfinite(part).all() for part in (total, kept, kept_by_candidate)) or not total.any():
            return False
        rows = np.flatnonzero(total > 0)
        apart = rows[self.minimum[rows] != self.candidate[rows]]
        weights = total
        if not self.of_averages:
            weights, whole = np.ones_like(total), np.where(total > 0, total, 1)
            # A sum over all elements, and one over those that are not 0, may differ in the last bit.
            kept, kept_by_candidate = (np.minimum(part / whole, 1) for part in (kept, kept_by_candidate))
        self._average(rows, self.minimum, kept, weights)
        self._average(apart, self.candidate, kept_by_candidate, weights)
        self.steps[np.arange(len(self.sent)), self.sent] += 1
        self.taken += 1
        ended = self.taken % self.window == 0
        if ended:
            for row in range(len(self.sent)):
                self._check(row)
            self._seconds, self._timed = [], []
        gains, every = self.gains, np.arange(len(self.sent))
        fallback = np.where(gains[every, self.minimum] >= self.epsilon, self.minimum, DENSE)
        self.sent = np.where(gains[every, self.candidate] >= self.epsilon, self.candidate, fallback)
        return ended

    def _average(self, rows: Numbers, factors: Numbers, values: Doubles, weights: Doubles) -> None:
        newest = min(1.0, self.world / 100)
        at = (rows, factors[rows])
        self._sums[at] = (1 - newest) * self._sums[at] + newest * values[rows]
        self._weights[at] = (1 - newest) * self._weights[at] + newest * weights[rows]

    def _check(self, row: int) -> None:
        """Runs lines 33 to 39 for one row."""
        gains, throughput = self.gains[row], self.throughput[row]
        sent = np.array([one[row] for one in self._timed], dtype=np.int64)
        for factor in np.unique(sent).tolist():
            systems = self.world / np.array(self._seconds)[sent == factor]
            throughput[factor] = gains[factor] * np.median(systems)
        least, candidate = int(self.minimum[row]), int(self.candidate[row])
        if abs(gains[least] - gains[candidate]) <= self.omega * gains[least]:
            self.minimum[row] = candidate
        self.candidate[row] = min(candidate + 1, len(self.factors) - 1)
        known = np.flatnonzero(~np.isnan(throughput))
        if len(known) < 2:
            return
        second, best = known[np.argsort(throughput[known], kind="stable")[-2:]].tolist()
        if abs(throughput[best] - throughput[second]) <= self.omega * throughput[second]:
            ideal = min(best, second)
            self.candidate[row] = ideal
            self.minimum[row] = min(int(self.minimum[row]), ideal)

    # -- state -------------------------------------------------------------------------------------------------

    def state(self, names: Sequence[str]) -> SearchState:
        """Returns rows by name and factors by value, of the factors that were sent or measured."""
        rows = {name: self._row(i) for i, name in enumerate(names)}
        return SearchState(self.taken, list(self._seconds), rows)

    def _row(self, row: int) -> RowState:
        factors = self.factors
        known = np.flatnonzero((self._weights[row] > 0) | (self.steps[row] > 0)).tolist()
        steps, sums, weights = (of[row].tolist() for of in (self.steps, self._sums, self._weights))
        throughput = [None if np.isnan(t) else t for t in self.throughput[row].tolist()]
        return RowState(
            factors[self.minimum[row]],
            factors[self.candidate[row]],
            factors[self.sent[row]],
            [factors[one[row]] for one in self._timed],
            [(factors[k], steps[k], sums[k], weights[k], throughput[k]) for k in known],
        )

    @property
    def numbers(self) -> dict[float, int]:
        """Returns the index of each factor, by its value."""
        return {factor: k for k, factor in enumerate(self.factors)}

    def restore(self, names: Sequence[str], saved: SearchState) -> None:
        """Continues from a saved state. Rows that are new, or that have factors which do not exist here, start anew.

        Raises ValueError, before anything changes, if windows have different lengths.
        """
        numbers = self.numbers
        rows = {row: saved.rows[name] for row, name in enumerate(names) if name in saved.rows}
        if any(len(one.timed) != len(saved.seconds) for one in rows.values()):
            raise ValueError("the rows' windows have different lengths")
        rows = {row: one for row, one in rows.items() if one.values <= numbers.keys()}
        self.taken = saved.taken
        for row, one in rows.items():
            self.minimum[row], self.candidate[row] = numbers[one.minimum], numbers[one.candidate]
            self.sent[row] = numbers[one.sent]
            for factor, steps, total, weight, throughput in one.factors:
                k = numbers[factor]
                self.steps[row, k], self._sums[row, k], self._weights[row, k] = steps, total, weight
                self.throughput[row, k] = np.nan if throughput is None else throughput
        self._seconds, self._timed = [], []
        if len(rows) == len(names):
            self._seconds = list(saved.seconds)
            timed = [[numbers[factor] for factor in rows[row].timed] for row in range(len(names))]
            self._timed = list(np.array(timed, dtype=np.int64).T)
