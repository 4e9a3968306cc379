"""Bayes chooses levels by Bayesian optimisation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradcomp.control.grouped import Grouped, clusters_of
from gradcomp.control.levels import (
    Numbers,
    check_count,
    check_positive,
    fallback,
    keeping_silent,
    levels_by_bytes,
    total_bytes,
    total_error,
)
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.core.errors import ConfigError

#: The cost of an assignment over the budget is at most this many times the largest number of bytes.
_FAR = 1e6


@dataclass(frozen=True)
class Bayes(Grouped):
    """Searches for the fewest bytes within the error of the reference, by Bayesian optimisation.

    Over the levels k_l of the layers, it minimises

        Σ_l bytes_l(k_l)    subject to    Σ_l error_l(k_l)  <=  alpha · Σ_l error_l(reference)

    error_l is the L2 norm of the error of a level on the gradient summed over a period. Optuna's tree-structured Parzen
    estimator proposes ``trials`` assignments, beginning with the reference and the current plan. An assignment over the
    budget costs the largest possible number of bytes, times the ratio of its error to the budget. If there are many
    layers, those that ``KMeans`` would put into one of ``clusters`` clusters share a level in the search. The cheapest
    assignment within the budget is taken, of equally cheap ones the one with the smaller error; if none is within it,
    layers use the reference, and a warning is logged once.

    Args:
        every_steps: steps in a period.
        levels: candidates, which are levels or compressors; by default the range of L-GreCo around the layer's own.
        alpha: the budget, relative to the reference; above 0.
        trials: assignments to try in every period.
        seed: seeds the search, whose result is a function of the seed and the period's table.
        clusters: the most levels to search for; None for one per layer.
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64: per layer 4 numbers and one per level; then 1 per layer.

    State: a flag that the warning was given; the sums of :class:`Periodic`. The search starts anew in every period.

    Errors: ConfigError if Optuna is not installed (extra ``gradcomp[bayes]``), if ``levels`` is empty or has a level
    that layers cannot take, if alpha is not above 0, if trials or clusters is not at least 1, or if the seed is not a
    whole number of 32 bits.

    Source: Markov 2024, section 3.6 and Table 3.8.
    Differences: the paper names neither an optimiser nor a number of trials, and calls the method hard to tune.
    Clusters are ours: with 161 separate layers, 64 trials took seconds and found nothing better than the reference.
    """

    name: ClassVar[str] = "bayes"

    alpha: float | None = 1.0
    trials: int = 64
    seed: int = 0
    clusters: int | None = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("alpha", self.alpha)
        check_count("trials", self.trials)
        if self.clusters is not None:
            check_count("clusters", self.clusters)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed must be a whole number from 0 to 2^32 - 1, got {self.seed!r}")
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("Bayes needs Optuna: pip install 'gradcomp[bayes]'")

    def decide(self, observed: PeriodObservations) -> Decision:
        """Searches, and takes the best assignment."""
        reference = keeping_silent(observed, observed.candidates.reference)
        assert self.alpha is not None, "it was checked"
        budget = self.alpha * total_error(observed, reference)
        tried = self._search(observed, reference, budget)
        good = [(cost, error, i) for i, (cost, error, _) in enumerate(tried) if error <= budget]
        if not good:
            return fallback(observed, self.name, self.alpha)
        _, _, best = min(good)
        reason = f"assignment {best} of {len(tried)}, {len(good)} of them within the budget"
        return Decision(tried[best][2], observed.memory, reason)

    def _search(
        self, observed: PeriodObservations, reference: Numbers, budget: float
    ) -> list[tuple[float, float, Numbers]]:
        """Returns bytes, error and choices of the two starting points and of every trial."""
        order = levels_by_bytes(observed.candidates)
        last, groups = _last(observed), self.groups(observed)
        top = [int(last[rows].max()) for rows in groups]
        starts = [reference, keeping_silent(observed, observed.current)]
        tried = [(total_bytes(observed, start), total_error(observed, start), start) for start in starts]
        if not groups:
            return tried
        study, ranges = _study(self.seed, top)
        for start in starts:
            middle = [rows[len(rows) // 2] for rows in groups]
            at = [int(np.flatnonzero(order[row] == start[row])[0]) for row in middle]
            study.enqueue_trial({str(j): round(top[j] * at[j] / last[row]) for j, row in enumerate(middle)})
        most = float(np.where(np.isinf(observed.costs), 0, observed.costs).max(1).sum())
        for _ in range(self.trials):
            trial = study.ask(ranges)
            choices = reference.copy()
            for j, rows in enumerate(groups):
                at_rows = np.floor(trial.params[str(j)] / top[j] * last[rows] + 0.5).astype(np.int64)
                choices[rows] = [order[row][k] for row, k in zip(rows, at_rows, strict=True)]
            cost, error = total_bytes(observed, choices), total_error(observed, choices)
            tried.append((cost, error, choices))
            over = most * (min(error / budget, _FAR) if budget else _FAR)
            study.tell(trial, cost if error <= budget else over)
        return tried

    def groups(self, observed: PeriodObservations) -> list[Numbers]:
        """Returns the rows that share a level: clusters, or single rows if there are few.

        Rows without a gradient or without a choice are left out.
        """
        rows = np.flatnonzero(~observed.silent & (_last(observed) > 0))
        if self.clusters is None or len(rows) <= self.clusters:
            return [rows[i : i + 1] for i in range(len(rows))]
        return clusters_of(observed, rows, self.clusters)


def _last(observed: PeriodObservations) -> Numbers:
    """Returns by row the number of its last level."""
    return np.array([len(choices) - 1 for choices in observed.candidates.choices], dtype=np.int64)


def _study(seed: int, top: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Returns Optuna's study, created without its log line, and the range of every parameter."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study, {str(j): optuna.distributions.IntDistribution(0, n) for j, n in enumerate(top)}
