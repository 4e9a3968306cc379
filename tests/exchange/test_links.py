"""Latency and rate of the links, measured."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gradcomp.core.topology import Topology
from gradcomp.exchange.reports import measure
from gradcomp.transport.inprocess import World


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 0, 1), (0, 1, 2, 2, 0)], ids=str)
def test_all_ranks_get_the_same_figures(hosts: tuple[int, ...]):
    transports = World(len(hosts)).transports()
    with ThreadPoolExecutor(len(hosts)) as threads:
        found = list(threads.map(lambda transport: measure(transport, Topology(hosts)), transports))
    assert len(set(found)) == 1
    network = found[0]
    assert network.encode_rate > 1e6
    assert network.decode_rate > 1e6
    assert network.overhead >= 0
    several, shared = len(set(hosts)) > 1, len(set(hosts)) < len(hosts)
    assert (network.alpha > 0) == (network.beta > 0) == several
    assert (network.local_alpha > 0) == (network.local_beta > 0) == shared
    assert {transport.bytes_sent for transport in transports} == {0}
