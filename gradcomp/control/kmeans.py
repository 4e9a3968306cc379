"""Levels by clusters of layers that are alike in size and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.checks import check_count
from gradcomp.control.grouped import Grouped
from gradcomp.control.observations import Numbers, PeriodObservations

#: Starts, of which the best is taken, and steps of each, at most.
_STARTS, _STEPS = 20, 300


@dataclass(frozen=True)
class KMeans(Grouped):
    """Clusters of layers by size and gradient; the larger and quieter a cluster, the more it is compressed.

    With G_l the gradient of layer l added up over a period, every layer is a point

        (log size_l, log ||G_l||),    each coordinate standardised over the layers.

    k-means puts them into k clusters with centroids C. Sorted by norm(C) - size(C), the first cluster gets the most
    compression that there is, the last the least, and those in between levels in equal distances. The budget is

        Σ_l ||G_l - decompress(compress(G_l))||  <=  alpha · (the same sum at the reference)

    While it is not met, the cluster with the most compression, of several the last in that order, goes one level back;
    if that does not help, layers take the reference, and one warning says so. Then, as long as it is met, the cluster
    with the least compression, of several the first, goes one level on. Where the reference meets the budget with fewer
    bytes, it is the reference.

    Args:
        every_steps: steps in a period.
        levels: what layers may travel as, by default L-GreCo's range around the layer's own. Compressors instead of
            levels vary more than one knob: ``[Quantize(2, bucket_size=1024), Quantize(4, bucket_size=512)]``.
        alpha: the budget, relative to the reference; above 0. None: none, only Algorithm 3.1.
        clusters: k; by default the number of levels. Never more than there are different layers.
        window: add up only the last so many steps of a period; by default all of them.
        samples: measure so many single steps of it instead; see :class:`Periodic`.
        memory_bytes: cap on what is held for sums, on every rank.

    Wire: twice a period a sum over ranks of float64: per layer 4 numbers and, with a budget, one per level; then 1.

    State: whether the warning was given; the sums of :class:`Periodic`.

    Raises:
        ConfigError: no levels, or a level that layers cannot take; alpha is not above 0, clusters not at least 1.

    Source: Markov 2024, Algorithm 3.1 and section 3.6 (CGX). Differences: logarithms, standardised, since
    sizes and norms have no common scale; the norm of all of G and not of its top values; how the budget is met, which
    the paper leaves open (without the way on, sensitive layers would keep the least compression, whatever it costs); a
    single cluster begins at the reference.
    """

    name: ClassVar[str] = "kmeans"

    alpha: float | None = 1.0
    clusters: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters is not None:
            check_count("clusters", self.clusters)

    def groups(self, observed: PeriodObservations) -> Sequence[Numbers]:
        """Algorithm 3.1 up to the order of the clusters."""
        return clusters_of(
            observed, np.flatnonzero(~observed.silent), self.clusters or observed.candidates.width
        )


def clusters_of(observed: PeriodObservations, rows: Numbers, k: int) -> list[Numbers]:
    """The rows in at most k clusters, the one with the largest norm(C) - size(C) first."""
    if not len(rows):
        return []
    sizes = np.array([observed.candidates.specs[row].size for row in rows], dtype=np.float64)
    size, norm = _standardised(np.log(sizes)), _standardised(np.log(observed.norm[rows]))
    labels = kmeans(np.stack([size, norm], axis=1), k)
    order = np.argsort([-(norm - size)[labels == j].mean() for j in range(labels.max() + 1)], kind="stable")
    return [rows[labels == j] for j in order]


def _standardised(values: Doubles) -> Doubles:
    """Mean 0 and deviation 1; zeros where all are equal."""
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 1e-12 else np.zeros(len(values))


def kmeans(points: Doubles, k: int, seed: int = 0) -> Numbers:
    """Lloyd's algorithm from greedy k-means++ starts, the best of several: the cluster of every point; none is empty.

    The same for the same points. ``k``: at most as many clusters, fewer if there are fewer different points.
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
    """k-means++: of a few points, drawn with the squared distance to the nearest centre, the one that leaves least."""
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
    """Points to the nearest centre, centres to the mean of their points, until nothing moves."""
    k, each = len(centres), np.arange(len(points))
    labels = np.full(len(points), -1, dtype=np.int64)
    for _ in range(_STEPS):
        distance = ((points[:, None] - centres) ** 2).sum(2)
        nearest = distance.argmin(1)
        for j in np.flatnonzero(np.bincount(nearest, minlength=k) == 0):
            # A centre that lost its points takes the one that is farthest from its own.
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
