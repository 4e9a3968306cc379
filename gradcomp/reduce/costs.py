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
from gradcomp.reduce.model import Cost, Load, Network, Numbers
from gradcomp.reduce.sums import carried

#: The part of the time that is hidden where rounds under way together have different busiest links; measured with
#: `tree` and `parameter_server` on 2, 4 and 8 hosts.
OVERLAP = 0.8


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


def predict_step(scheme: Scheme, load: Load, buckets: int, topology: Topology, network: Network) -> float:
    """Return the time in seconds of a step of equal exchange buckets that are all ready when it begins.

    The pipeline proceeds in ticks: tick t issues round 0 of bucket t, round 1 of bucket t - 1, and so on, so B buckets
    of R rounds take B + R - 1 ticks. The rounds of a tick are under way together. A tick takes alpha, the processor's
    overhead of every round after the first, and the time of the busiest link. Links work in both directions at once,
    but a rank reports that it is ready to receive on the connection on which it sends. So rounds with different
    busiest links overlap in part: the link's time is OVERLAP of that of the busiest link when all bytes of the tick are
    added up, and the rest of that of the rounds one after the other. Both are equal for reductions in which all ranks
    send and receive alike. Coding counts in full, since it shares the processor with the rounds.

    With one bucket it is :func:`predict`.
    """
    one, hosts = cost(scheme, load, topology), np.asarray(topology.hosts)
    coding = buckets * load.dense * (one.encoded / network.encode_rate + one.decoded / network.decode_rate)
    if not one.flows:
        return coding
    distinct = {id(flow): flow for flow in one.flows}  # all rounds of a ring may be one flow
    numbers = {key: number for number, key in enumerate(distinct)}
    done = np.zeros((len(one.flows) + 1, len(distinct)))  # how often each flow occurs before a round
    done[np.arange(1, len(done)), [numbers[id(flow)] for flow in one.flows]] = 1
    done = done.cumsum(axis=0)
    ticks = np.arange(buckets + one.rounds - 1)
    first, last = np.maximum(ticks - buckets + 1, 0), np.minimum(ticks + 1, one.rounds)
    under_way = done[last] - done[first]  # by tick and flow
    flows = list(distinct.values())

    def by_host(side: Numbers) -> Numbers:
        return np.bincount(hosts, side).astype(np.float64)

    def seconds(alpha: float, beta: float, sides: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
        """Return each tick's time on links, of which every flow loads some with bytes sent and received."""
        loads = np.array([np.concatenate(side) for side in sides])
        together, in_turn = (under_way @ loads).max(axis=1), under_way @ loads.max(axis=1)
        return np.where(in_turn > 0, alpha + beta * (OVERLAP * together + (1 - OVERLAP) * in_turn), 0.0)

    between = [(by_host(flow.sent), by_host(flow.received)) for flow in flows]
    inside = [(flow.sent_inside, flow.received_inside) for flow in flows]
    wire = np.maximum(
        seconds(network.alpha, network.beta, between),
        seconds(network.local_alpha, network.local_beta, inside),
    )
    return coding + float((wire + network.overhead * (last - first - 1)).sum())


def cheapest(
    parts: Sequence[Part], layers: int, topology: Topology, network: Network | None, buckets: int = 1
) -> Scheme:
    """Return the reduction that ``auto`` chooses: `sra` on one host (Markov 2024, Table 3.4), else the fastest one.

    The fastest one is that with which a step of as many such exchange buckets is predicted to be the shortest. Of
    equally fast ones it is the one that was registered first. Reductions that cannot add one of the codecs are left
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
        seconds[name] = predict_step(Scheme(name), even, buckets, topology, network)
    return Scheme(min(seconds, key=seconds.__getitem__))
