"""Controllers that choose one level for a group of layers: Linear and KMeans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.candidates import CandidateLevels, Candidates
from gradcomp.control.levels import check_count, check_levels, check_positive, fallback, linear_map
from gradcomp.control.observations import Decision, Numbers, PeriodObservations
from gradcomp.control.periodic import Periodic

#: Number of starts, of which the best is taken, and the most steps of each.
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

        (log size_l, log ||G_l||),    each coordinate standardised over the layers.

    k-means puts them into k clusters with centroids C. Clusters are sorted by norm(C) - size(C), ascending: the first
    gets the most compression, the last the least, and those in between evenly spaced levels. The budget is

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
        window: sums gradients over only the last this many steps of a period; by default over all of them.
        samples: measures this many single steps of a period instead; see :class:`Periodic`.
        memory_bytes: limit on the memory that every rank uses for these sums.

    Wire: twice a period a sum over ranks of float64: per layer 4 numbers and, with a budget, one per level; then 1.

    State: a flag that the warning was given; the sums of :class:`Periodic`.

    Errors: ConfigError if ``levels`` is empty or has a level that layers cannot take, if alpha is not above 0, or if
    clusters is not at least 1.

    Source: Markov 2024, Algorithm 3.1 and section 3.6 (CGX).
    Differences: logarithms, standardised, are clustered, since sizes and norms have no common scale; the norm is that
    of all of G and not of its largest values; the paper leaves open how the budget is met (without moving levels on,
    sensitive layers would keep the least compression, whatever it costs); a single cluster begins at the reference.
    """

    name: ClassVar[str] = "kmeans"

    alpha: float | None = 1.0
    clusters: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters is not None:
            check_count("clusters", self.clusters)

    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Returns the clusters of Algorithm 3.1 in their order."""
        return clusters_of(
            observed, np.flatnonzero(~observed.silent), self.clusters or observed.candidates.width
        )


def clusters_of(observed: PeriodObservations, rows: Numbers, k: int) -> list[Numbers]:
    """Returns the rows in at most k clusters, the one with the largest norm(C) - size(C) first."""
    if not len(rows):
        return []
    sizes = np.array([observed.candidates.specs[row].size for row in rows], dtype=np.float64)
    size, norm = _standardised(np.log(sizes)), _standardised(np.log(observed.norm[rows]))
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
