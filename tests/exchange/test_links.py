"""Latency and rate of the links, measured."""

from __future__ import annotations

import threading

import pytest

from gradcomp.core.topology import Topology
from gradcomp.exchange.reports import measure
from gradcomp.reduce.model import Network
from gradcomp.transport.inprocess import World

HOSTS = [(0, 0), (0, 1), (0, 0, 1), (0, 1, 2, 2, 0)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_all_ranks_get_the_same_figures(hosts: tuple[int, ...]):
    transports = World(len(hosts)).transports()
    found: dict[int, Network] = {}

    def run(rank: int) -> None:
        found[rank] = measure(transports[rank], Topology(hosts))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found.values())) == 1
    network = found[0]
    assert network.encode_rate > 1e6
    assert network.decode_rate > 1e6
    several, shared = len(set(hosts)) > 1, len(set(hosts)) < len(hosts)
    assert (network.alpha > 0) == (network.beta > 0) == several
    assert (network.local_alpha > 0) == (network.local_beta > 0) == shared
    assert {transport.bytes_sent for transport in transports} == {0}
