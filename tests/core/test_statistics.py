"""Counters."""

from __future__ import annotations

import numpy as np

from gradcomp.core.trace import Statistics


def test_the_mean_over_ranks_reads_back():
    ranks = [Statistics(10, 1, 1000, 8000, 0.5, 1.5, 0.25), Statistics(10, 1, 1001, 8000, 1.5, 2.5, 0.75)]
    mean = Statistics.mean(np.sum([rank.vector() for rank in ranks], axis=0), 2)
    assert mean == Statistics(10, 1, 1000, 8000, 1.0, 2.0, 0.5)


def test_every_field_is_reduced():
    assert len(Statistics().vector()) == len(Statistics.FIELDS) == len(vars(Statistics()))


def test_ratio_is_dense_over_sent():
    assert Statistics(wire_bytes=100, dense_bytes=760).ratio == 7.6
    assert Statistics().ratio == 1.0
