"""The information plane: the information that two ranks' gradients share, by layer and step.

It is that of Abrahamyan et al. 2021 (LGC), Figures 3, 4 and 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.contrib.information import (
    Binning,
    Correction,
    bins_for,
    check_correction,
    correlation_for,
    gaussian_information,
    gaussian_pair,
    mutual_information,
)
from gradcomp.contrib.recording import Recording
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plane:
    """The information of the gradients of two ranks, in bits per element, as arrays of shape (layers, steps).

    Values are NaN if a rank had no gradient, or one that is not finite. ``pair``: the ranks 1 and 2 of equation 1, so
    ``entropy`` is H(g_2), ``other_entropy`` H(g_1), ``conditional`` H(g_2 | g_1). ``null``: ``mutual`` of shuffled
    pairs. ``gaussian``: exact, of Gaussian variables with the correlation of the gradients. ``calibration``, by layer:
    the estimate, from the same number of elements, of Gaussian draws whose information is the layer's mean of
    ``gaussian``.
    """

    layers: tuple[LayerSpec, ...]
    elements: tuple[int, ...]
    steps: npt.NDArray[np.int64]
    pair: tuple[int, int]
    entropy: Array
    other_entropy: Array
    joint: Array
    null: Array
    gaussian: Array
    calibration: Array

    @property
    def mutual(self) -> Array:
        """Returns the mutual information I(g_1; g_2)."""
        return self.entropy + self.other_entropy - self.joint

    @property
    def conditional(self) -> Array:
        """Returns the innovation H(g_2 | g_1)."""
        return self.joint - self.other_entropy

    def mean(self, values: Array) -> Array:
        """Returns by layer the mean over the steps in which both ranks had a gradient; NaN if there are none."""
        there = np.isfinite(values)
        counts = there.sum(axis=1)
        total = np.where(there, values, 0.0).sum(axis=1)
        return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)

    def share(self, values: Array) -> float:
        """Returns the mean of ``values`` divided by the mean of the entropy; NaN if there is no entropy."""
        above, below = (
            np.nanmean(each) if np.isfinite(each).any() else np.nan for each in (values, self.entropy)
        )
        return float(above / below) if below > 0 else float("nan")


def information_plane(
    recording: Recording,
    pair: tuple[int, int] = (0, 1),
    *,
    layers: Sequence[str] | None = None,
    bins: int | None = None,
    binning: Binning = "uniform",
    correction: Correction = "none",
    shuffles: int = 4,
    seed: int = 0,
) -> Plane:
    """Computes the information plane of two ranks of a recording.

    Args:
        recording: the recorded gradients.
        pair: the two ranks.
        layers: shell patterns on names; None for all layers of at least 2 elements.
        bins: as for :func:`mutual_information`.
        binning: as for :func:`mutual_information`.
        correction: as for :func:`mutual_information`.
        shuffles: as for :func:`mutual_information`.
        seed: as for :func:`mutual_information`.

    Not collective. 4,096 elements take about 0.2 ms, and each shuffle as much again.

    Raises:
        ConfigError: bad arguments, ranks that the recording does not have, or a recording without steps or of one rank.
    """
    check_correction(correction, shuffles)
    first, second = _checked(recording, pair)
    chosen = range(len(recording.layers)) if layers is None else recording.matching(layers)
    numbers = [i for i in chosen if len(recording.sampling.positions[i]) > 1]
    if not numbers:
        raise ConfigError("the recording has no layer of at least 2 elements")
    bins_for(2, bins, binning)
    settings: dict[str, Any] = {"bins": bins, "binning": binning, "correction": correction}
    shape = len(numbers), len(recording.steps)
    grids = np.full((5, *shape), np.nan)
    entropy, other_entropy, joint, null, gaussian = grids
    calibration = np.full(len(numbers), np.nan)
    for row, number in enumerate(numbers):
        x, y = recording.of(number, first), recording.of(number, second)
        usable = np.flatnonzero(np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1))
        for step in usable.tolist():
            found = mutual_information(
                x[step], y[step], shuffles=shuffles, seed=_seed(seed, row, step), **settings
            )
            # The information of equal vectors is infinite, so that a mean over steps would be too; NaN stays NaN.
            finite = np.minimum(found.gaussian, gaussian_information(1 - 2.0**-24))
            grids[:, row, step] = found.entropy_y, found.entropy_x, found.joint, found.null, finite
        known = gaussian[row][np.isfinite(gaussian[row])]
        if len(known):
            draws = gaussian_pair(correlation_for(float(known.mean())), x.shape[1], _seed(seed, row, -1))
            calibration[row] = mutual_information(*draws, shuffles=0, **settings).mutual
    return Plane(
        layers=tuple(recording.layers[i] for i in numbers),
        elements=tuple(len(recording.sampling.positions[i]) for i in numbers),
        steps=recording.steps,
        pair=(first, second),
        entropy=entropy,
        other_entropy=other_entropy,
        joint=joint,
        null=null,
        gaussian=gaussian,
        calibration=calibration,
    )


def _checked(recording: Recording, pair: tuple[int, int]) -> tuple[int, int]:
    if recording.ranks < 2:
        raise ConfigError(
            f"the recording has {recording.ranks} rank{'s' * (recording.ranks != 1)}; a comparison needs two"
        )
    if not len(recording.steps):
        raise ConfigError("the recording has no step")
    first, second = pair
    if first == second or not all(0 <= rank < recording.ranks for rank in pair):
        raise ConfigError(f"a pair must be two of ranks 0 to {recording.ranks - 1}, got {first} and {second}")
    return first, second


def _seed(seed: int, row: int, step: int) -> int:
    """Returns a different seed for each layer and step."""
    return int(np.random.SeedSequence([seed, row, step + 1]).generate_state(1)[0])
