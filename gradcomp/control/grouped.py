"""Controllers that choose one level for a group of layers: Linear, KMeans and Bayes."""

from __future__ import annotations

import importlib.util
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress.checks import check_positive, check_whole, check_word
from gradcomp.control.base import Doubles, Numbers
from gradcomp.control.candidates import CandidateLevels, Candidates, check_levels
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic import Periodic
from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")

#: The cost of an assignment over the budget is at most this many times the largest number of bytes.
_FAR = 1e6

#: The coordinates in which layers are clustered.
LOG, PLAIN = "log", "plain"

#: Number of k-means' starts, of which the best is taken, and the most steps of each.
_STARTS, _STEPS = 20, 300


@dataclass(frozen=True)
class Grouped(Periodic):
    """Base of the controllers that map levels linearly to groups of layers, within a budget if ``alpha`` is given."""

    levels: Candidates | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels)
        if self.alpha is not None:
            check_positive("alpha", self.alpha)

    @property
    def needs_errors(self) -> bool:
        return self.alpha is not None

    def candidates(self) -> Candidates | None:
        return self.levels

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        return np.zeros(1)

    @abstractmethod
    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Returns the rows that had a gradient, in groups, the most sensitive first."""

    def decide(self, observed: PeriodObservations) -> Decision:
        groups = self.groups(observed)
        choices = linear_map(observed, groups, self.alpha)
        if choices is None:
            assert self.alpha is not None, "without a budget there is always a choice"
            return fallback(observed, self.name, self.alpha)
        return Decision(choices, observed.memory, f"{sum(map(len, groups))} layers in {len(groups)} groups")


@dataclass(frozen=True)
class Linear(Grouped):
    """Compresses a layer more the smaller its gradient is for its size, linearly in the order of layers.

    Layers are sorted by ||G_l|| / size_l, with G_l the gradient summed over a period. The first gets the most
    compression, the last the least: with L layers and n levels, the least compression first, the layer at position i
    (from 0) gets level number

        round((1 - i / (L-1)) (n-1))

    Equal layers keep their order in the model; a single layer uses the reference. If nothing is within the budget, all
    layers use the reference, and a warning is logged once.

    Args:
        every_steps: steps in a period.
        levels: candidates, which are levels or compressors; by default L-GreCo's range around the layer's own level.
        alpha: budget on the sum of the layers' errors, relative to the reference's, met as ``KMeans`` does. With None
            there is no budget, as in the source; the layers may then send several times as much as the reference.
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64, 4 numbers and one per level for each layer; then 1.

    State: a flag that the warning was given; the sums of :class:`Periodic`.

    Errors: ConfigError if ``levels`` is empty or has a level that layers cannot take, or if alpha is not above 0.

    Source: Markov 2024, section 3.6.
    Differences: the source has neither the budget nor levels other than bits. Without the budget TopK sent 1.6 and 2.1
    times the bytes of the uniform level.
    """

    name: ClassVar[str] = "linear"

    alpha: float | None = 1.0

    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Returns every layer as a group, the largest norm per element first."""
        rows = np.flatnonzero(~observed.silent)
        density = observed.norm[rows] / [observed.candidates.specs[row].size for row in rows]
        return [rows[i : i + 1] for i in np.argsort(density, kind="stable")[::-1]]


@dataclass(frozen=True)
class KMeans(Grouped):
    """Clusters layers by size and gradient; large layers with small gradients are compressed most.

    With G_l the gradient of layer l summed over a period, every layer is a point

        (log size_l, log ||G_l||),    each coordinate standardised over the layers,

    or with ``points="plain"`` (size_l, ||G_l||), where sizes outweigh norms, so that the largest layers get the most
    compression. k-means puts them into k clusters with centroids C. Clusters are sorted by norm(C) - size(C),
    ascending: the first gets the most compression, the last the least, and those in between evenly spaced levels. The
    budget is

        Σ_l ||G_l - decompress(compress(G_l))||  <=  alpha · (the same sum at the reference)

    While the error is above the budget, the cluster with the most compression, of several the last in that order, moves
    one level back; if that does not suffice, layers use the reference, and a warning is logged once. Then, while the
    error is within the budget, the cluster with the least compression, of several the first, moves one level on. If the
    reference is within the budget and takes fewer bytes, it is used.

    Args:
        every_steps: steps in a period.
        levels: candidates, by default L-GreCo's range around the layer's own level. Compressors instead of levels can
            vary several settings: ``[Quantize(2, bucket_size=1024), Quantize(4, bucket_size=512)]``.
        alpha: the budget, relative to the reference; above 0. With None there is no budget, only Algorithm 3.1.
        clusters: k; by default the number of levels. It is never more than there are different layers.
        points: ``"log"`` or ``"plain"``. Algorithm 3.1 as it is printed is ``points="plain", alpha=None``.
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64: per layer 4 numbers and, with a budget, one per level; then 1.

    State: a flag that the warning was given; the sums of :class:`Periodic`.

    Errors: ConfigError if ``levels`` is empty or has a level that layers cannot take, if alpha is not above 0, if
    clusters is not at least 1, or for other points.

    Source: Markov 2024, Algorithm 3.1 and section 3.6 (CGX).
    Differences: by default logarithms, standardised, are clustered, since sizes and norms have no common scale; the
    norm is that of all of G and not of its largest values; the paper leaves open how the budget is met (without moving
    levels on, sensitive layers would keep the least compression, whatever it costs) and how large alpha is; a single
    cluster begins at the reference.
    """

    name: ClassVar[str] = "kmeans"

    alpha: float | None = 1.0
    clusters: int | None = None
    points: str = LOG

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("clusters", self.clusters, or_none=True)
        check_word("points", self.points, (LOG, PLAIN))

    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Returns the clusters of Algorithm 3.1 in their order."""
        k = self.clusters or observed.candidates.width
        return clusters_of(observed, np.flatnonzero(~observed.silent), k, self.points)


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
        check_whole("trials", self.trials)
        check_whole("clusters", self.clusters, or_none=True)
        check_whole("seed", self.seed, 0, (1 << 32) - 1)
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("Bayes needs Optuna: pip install 'gradcomp[bayes]'")

    def decide(self, observed: PeriodObservations) -> Decision:
        """Searches, and takes the best assignment."""
        reference = observed.keeping_silent(observed.candidates.reference)
        assert self.alpha is not None, "it was checked"
        budget = self.alpha * observed.total_error(reference)
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
        order, groups = levels_by_bytes(observed.candidates), self.groups(observed)
        last = np.array([len(levels) - 1 for levels in order], dtype=np.int64)
        top = [int(last[rows].max()) for rows in groups]
        starts = [reference, observed.keeping_silent(observed.current)]
        tried = [(observed.total_bytes(start), observed.total_error(start), start) for start in starts]
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
            cost, error = observed.total_bytes(choices), observed.total_error(choices)
            tried.append((cost, error, choices))
            over = most * (min(error / budget, _FAR) if budget else _FAR)
            study.tell(trial, cost if error <= budget else over)
        return tried

    def groups(self, observed: PeriodObservations) -> list[Numbers]:
        """Returns the rows that share a level: clusters, or single rows if there are few.

        Rows without a gradient or without a choice are left out.
        """
        several = np.array([len(choices) > 1 for choices in observed.candidates.choices], dtype=np.bool_)
        rows = np.flatnonzero(~observed.silent & several)
        if self.clusters is None or len(rows) <= self.clusters:
            return [rows[i : i + 1] for i in range(len(rows))]
        return clusters_of(observed, rows, self.clusters)


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


# --- levels of groups ---------------------------------------------------------------------------------------


def levels_by_bytes(candidates: CandidateLevels) -> list[Numbers]:
    """Returns every row's choices from the least compression to the most; equal ones in the order given."""
    rows = range(len(candidates.choices))
    return [np.argsort(-candidates.bytes_of(row), kind="stable") for row in rows]


class GroupLevels:
    """Moves groups of rows between levels, the most sensitive group first; rows of no group keep ``choices``."""

    def __init__(self, candidates: CandidateLevels, choices: Numbers, groups: Sequence[Numbers]) -> None:
        self.choices = choices.copy()
        self._groups = groups
        self._order = levels_by_bytes(candidates)
        self.last = np.array([len(levels) - 1 for levels in self._order], dtype=np.int64)
        pairs = zip(self._order, choices, strict=True)
        self._at = np.array([int(np.flatnonzero(levels == k)[0]) for levels, k in pairs])
        #: Compression of each group, from 0 for the least to 1 for the most.
        self.height = np.array([self._height(rows) for rows in groups])
        #: True for groups with more than one level.
        self.movable = np.array([self.last[rows].any() for rows in groups])

    def _height(self, rows: Numbers) -> float:
        return float((self._at[rows] / np.maximum(self.last[rows], 1)).max())

    def put(self, group: int, at: Numbers) -> None:
        """Moves a group's rows to these levels, or to the nearest that they have."""
        rows = self._groups[group]
        self._at[rows] = np.clip(at, 0, self.last[rows])
        self.height[group] = self._height(rows)
        self.choices[rows] = [self._order[row][self._at[row]] for row in rows]

    def move(self, group: int, by: int) -> Numbers:
        """Moves a group ``by`` levels to more compression; returns its previous levels, for :meth:`put`."""
        before: Numbers = self._at[self._groups[group]]
        self.put(group, before + by)
        return before


def linear_map(
    observed: PeriodObservations, groups: Sequence[Numbers], alpha: float | None
) -> Numbers | None:
    """Maps levels linearly to groups: the first group gets the least compression, the last the most.

    With n levels, the layers of group j of k (from 0) get number round(j (n-1) / (k-1)); a single group gets the
    reference. With ``alpha``, the total error is brought to alpha times that of the reference, in the order of the
    groups:

    - while it is above, the group with the most compression, of several the first, moves one level back; if all end
      at the least compression, the result is the reference if that is within the budget, else None;
    - then, while it is not above, the group with the least compression, of several the last, moves one level on;
    - if the reference is within the budget and takes fewer bytes, the result is the reference.

    Layers without a gradient keep their choice.
    """
    reference = observed.keeping_silent(observed.candidates.reference)
    grouped = GroupLevels(observed.candidates, reference, groups)
    for j, rows in enumerate(groups if len(groups) > 1 else ()):
        at = np.floor(j / (len(groups) - 1) * grouped.last[rows] + 0.5)
        grouped.put(j, at.astype(np.int64))
    if alpha is None or not groups:
        return grouped.choices
    budget = alpha * observed.total_error(reference)
    while observed.total_error(grouped.choices) > budget:
        most = int(np.argmax(grouped.height))
        if not grouped.height[most]:
            return reference if alpha >= 1 else None
        grouped.move(most, -1)
    while (free := np.flatnonzero(grouped.movable & (grouped.height < 1))).size:
        least = int(free[::-1][np.argmin(grouped.height[free[::-1]])])
        before = grouped.move(least, 1)
        if observed.total_error(grouped.choices) > budget:
            grouped.put(least, before)
            break
    cheaper = observed.total_bytes(reference) < observed.total_bytes(grouped.choices)
    return reference if alpha >= 1 and cheaper else grouped.choices


def fallback(observed: PeriodObservations, name: str, alpha: float) -> Decision:
    """Returns the reference, since nothing is within the budget.

    It logs a warning unless ``memory[0]`` says that one was given.
    """
    if not observed.memory[0]:
        text = "%s: no choice of levels has at most %g times the error of the reference; layers use the reference"
        logger.warning(text, name, alpha)
    choices = observed.keeping_silent(observed.candidates.reference)
    return Decision(choices, np.ones(1), "nothing is within the budget")


# --- clusters -----------------------------------------------------------------------------------------------


def clusters_of(observed: PeriodObservations, rows: Numbers, k: int, points: str = LOG) -> list[Numbers]:
    """Returns the rows in at most k clusters, the one with the largest norm(C) - size(C) first."""
    if not len(rows):
        return []
    size = np.array([observed.candidates.specs[row].size for row in rows], dtype=np.float64)
    norm = observed.norm[rows]
    if points == LOG:
        size, norm = _standardised(np.log(size)), _standardised(np.log(norm))
    labels = kmeans(np.stack([size, norm], axis=1), k)
    order = np.argsort([-(norm - size)[labels == j].mean() for j in range(labels.max() + 1)], kind="stable")
    return [rows[labels == j] for j in order]


def _standardised(values: Doubles) -> Doubles:
    """Returns the values with mean 0 and standard deviation 1, or zeros if all are equal."""
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 1e-12 else np.zeros(len(values))


def kmeans(points: Doubles, k: int, seed: int = 0) -> Numbers:
    """Returns the cluster of every point, by Lloyd's algorithm from greedy k-means++ starts, of which the best counts.

    The same points give the same clusters. There are at most ``k`` clusters, fewer if there are fewer different points;
    none is empty.
    """
    k = min(k, len(np.unique(points, axis=0)))
    random = np.random.default_rng(seed)
    best, least = np.zeros(len(points), dtype=np.int64), np.inf
    for _ in range(_STARTS):
        labels = _lloyd(points, _spread(points, k, random))
        inertia = float(((points - _means(points, labels, k)[labels]) ** 2).sum())
        if inertia < least:
            best, least = labels, inertia
    return best


def _spread(points: Doubles, k: int, random: np.random.Generator) -> Doubles:
    """Returns the starting centres of greedy k-means++.

    Of a few points, drawn in proportion to the squared distance to the nearest centre, the next centre is the one that
    leaves the smallest sum of squared distances.
    """
    centres = [points[random.integers(len(points))]]
    distance = ((points - centres[0]) ** 2).sum(1)
    while len(centres) < k:
        drawn = random.choice(len(points), size=2 + int(np.log(k)), p=distance / distance.sum())
        left = np.minimum(distance, ((points - points[drawn, None]) ** 2).sum(2))
        best = int(left.sum(1).argmin())
        centres.append(points[drawn[best]])
        distance = left[best]
    return np.array(centres)


def _lloyd(points: Doubles, centres: Doubles) -> Numbers:
    """Assigns points to the nearest centre and moves centres to the mean of their points, until nothing changes."""
    k, each = len(centres), np.arange(len(points))
    labels = np.full(len(points), -1, dtype=np.int64)
    for _ in range(_STEPS):
        distance = ((points[:, None] - centres) ** 2).sum(2)
        nearest = distance.argmin(1)
        for j in np.flatnonzero(np.bincount(nearest, minlength=k) == 0):
            # A centre that lost all its points gets the point that is farthest from its centre.
            crowded = np.bincount(nearest, minlength=k)[nearest] > 1
            nearest[np.where(crowded, distance[each, nearest], -1.0).argmax()] = j
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        centres = _means(points, labels, k)
    return labels


def _means(points: Doubles, labels: Numbers, k: int) -> Doubles:
    sums = np.stack([np.bincount(labels, column, minlength=k) for column in points.T], axis=1)
    means: Doubles = sums / np.bincount(labels, minlength=k)[:, None]
    return means
