"""What a reduction costs: bytes by rank and round, coding on the longest path, and time by the alpha-beta model.

Pure functions of sizes and of who shares a host. With the sizes of a bucket as it is cut (:func:`load_of`) bytes are
exact; with those of an even split they are the formulas of ``docs/algorithms.md``. The difference is what chunk borders
and headers cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme, names
from gradcomp.core.topology import Topology
from gradcomp.kernels.segments import VOTE
from gradcomp.reduce.base import Part
from gradcomp.reduce.chunks import Chunks
from gradcomp.reduce.header import ByteHeader
from gradcomp.reduce.model import Cost, Load, Network
from gradcomp.reduce.partial import carried
from gradcomp.reduce.registry import of


def load_of(scheme: Scheme, parts: Sequence[Part], layers: int) -> Load:
    """The sizes of one bucket under this reduction, as they are cut."""
    parts = carried(parts) if of(scheme).sums_travel else parts
    payload = sum(int(part.codec.wire_bytes(part.group.table).sum()) for part in parts)
    dense = 4 * sum(part.group.elements for part in parts)
    return Load(
        payload, dense, ByteHeader.size(layers), lambda count: Chunks(parts, layers, count).payload_bytes
    )


def cost(scheme: Scheme, load: Load, topology: Topology) -> Cost:
    """What one execution takes for this load among these ranks."""
    return of(scheme).cost(load, topology, scheme)


def predict(scheme: Scheme, load: Load, topology: Topology, network: Network) -> float:
    """Seconds of one execution, alone: the rounds of the longest path one after the other, and its coding.

    sum over rounds of (alpha + beta * bytes through the busiest link) + encoded n / rate + decoded n / rate.
    """
    one = cost(scheme, load, topology)
    hosts = np.asarray(topology.hosts)
    known: dict[int, float] = {}  # a ring repeats one flow
    wire = 0.0
    for flow in one.flows:
        if id(flow) not in known:
            known[id(flow)] = flow.seconds(hosts, network)
        wire += known[id(flow)]
    return (
        wire + load.dense * one.encoded / network.encode_rate + load.dense * one.decoded / network.decode_rate
    )


def cheapest(parts: Sequence[Part], layers: int, topology: Topology, network: Network | None) -> Scheme:
    """What ``auto`` stands for: on one host `sra` (Markov 2024, Table 3.4), else what takes least time.

    Equals go to the one that was registered first. Reductions that cannot add one of the
    codecs are left out. ``network`` may be missing on one host only.
    """
    if len(topology.leaders) == 1:
        return Scheme("sra")
    assert network is not None, "between hosts, constants must have been measured"
    votes = any(part.codec.kind == VOTE for part in parts)
    seconds = {}
    for name in names():
        if votes and of(Scheme(name)).sums_travel:
            continue
        exact = load_of(Scheme(name), parts, layers)
        even = Load(exact.payload, exact.dense, exact.header)
        seconds[name] = predict(Scheme(name), even, topology, network)
    return Scheme(min(seconds, key=seconds.__getitem__))
