"""RandomBlock: one stretch of every layer. What it shares with RandomK is tested there."""

from __future__ import annotations

import numpy as np

from gradcomp import LayerSpec, RandomBlock
from gradcomp.testing.simulation import Simulation


def stretches(mean: np.ndarray) -> int:
    """Runs of elements that are not 0, the layer taken as a ring."""
    sent = mean != 0
    return int(np.count_nonzero(sent & ~np.roll(sent, 1)))


def test_one_stretch_is_sent_and_wraps_around():
    ranks = Simulation([LayerSpec("w", (30,))], RandomBlock(0.4, feedback=False), 2)
    wrapped = 0
    for _ in range(40):
        mean = ranks.step().mean(0)
        assert np.count_nonzero(mean) == 12
        assert stretches(mean) == 1
        wrapped += mean[0] != 0 and mean[-1] != 0
    assert 0 < wrapped < 40


def test_layers_have_blocks_of_their_own():
    layers = [LayerSpec("a", (1000,)), LayerSpec("b", (1000,))]
    means = Simulation(layers, RandomBlock(0.01, feedback=False)).step().all_means()
    assert np.flatnonzero(means[0]).tolist() != np.flatnonzero(means[1]).tolist()
