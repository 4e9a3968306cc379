"""Latency and rate of the links, measured."""

from __future__ import annotations

import threading

import pytest

from gradcomp.engine.links import measure
from gradcomp.transport.inprocess import World


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_get_the_same_positive_figures(size: int):
    transports = World(size).transports()
    found: dict[int, tuple[float, float]] = {}

    def run(rank: int) -> None:
        found[rank] = measure(transports[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(found.values())) == 1
    alpha, beta = found[0]
    assert alpha > 0
    assert beta > 0
    assert {t.bytes_sent for t in transports} == {0}
