"""The cost of a reduction is computed from sizes and topology: bytes, coding work, and time by the alpha-beta model.

With the sizes of an exchange bucket as it is cut (:func:`load_of`) the bytes are exact. With chunks of equal size they
are the formulas of ``docs/algorithms.md``. The difference comes from chunk borders and headers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme, names
from gradcomp.core.topology import Topology
from gradcomp.kernels.segments import VOTE
from gradcomp.reduce.base import Part, class_of
from gradcomp.reduce.chunks import Chunks
from gradcomp.reduce.header import ByteHeader
from gradcomp.reduce.model import Cost, Load, Network
from gradcomp.reduce.sums import carried


def load_of(scheme: Scheme, parts: Sequence[Part], layers: int) -> Load:
    """Return the exact sizes of one exchange bucket under this reduction."""
    parts = carried(parts) if class_of(scheme).sums_travel else parts
    payload = sum(int(part.codec.wire_bytes(part.group.table).sum()) for part in parts)
    dense = 4 * sum(part.group.elements for part in parts)
    return Load(
        payload, dense, ByteHeader.size(layers), lambda count: Chunks(parts, layers, count).payload_bytes
    )


def cost(scheme: Scheme, load: Load, topology: Topology) -> Cost:
    """Return the messages and the coding work of one execution for this load."""
    return class_of(scheme).cost(load, topology, scheme)


def predict(scheme: Scheme, load: Load, topology: Topology, network: Network) -> float:
    """Return the time in seconds of one execution that nothing else overlaps.

    It is the sum over rounds of (alpha + beta * bytes through the busiest link), plus encoded n / encode_rate and
    decoded n / decode_rate for n bytes of float32.
    """
    one = cost(scheme, load, topology)
    hosts = np.asarray(topology.hosts)
    known: dict[int, float] = {}  # by identity, because all rounds of a ring may be one flow
    wire = 0.0
    for flow in one.flows:
        if id(flow) not in known:
            known[id(flow)] = flow.seconds(hosts, network)
        wire += known[id(flow)]
    return (
        wire + load.dense * one.encoded / network.encode_rate + load.dense * one.decoded / network.decode_rate
    )


def cheapest(parts: Sequence[Part], layers: int, topology: Topology, network: Network | None) -> Scheme:
    """Return the reduction that ``auto`` chooses: `sra` on one host (Markov 2024, Table 3.4), else the fastest one.

    Of equally fast ones it is the one that was registered first. Reductions that cannot add one of the codecs are left
    out. ``network`` is needed as soon as there are two hosts.
    """
    if len(topology.leaders) == 1:
        return Scheme("sra")
    assert network is not None, "between hosts, constants must have been measured"
    votes = any(part.codec.kind == VOTE for part in parts)
    seconds = {}
    for name in names():
        if votes and class_of(Scheme(name)).sums_travel:
            continue
        exact = load_of(Scheme(name), parts, layers)
        even = Load(exact.payload, exact.dense, exact.header)
        seconds[name] = predict(Scheme(name), even, topology, network)
    return Scheme(min(seconds, key=seconds.__getitem__))
