"""What a reduction costs: bytes by rank and round, coding on the longest path, and time by the alpha-beta model.

Pure functions of sizes and of who shares a host. With the sizes of a bucket as it is cut (:func:`load_of`) bytes are
exact; with those of an even split they are the formulas of ``docs/algorithms.md``. The difference is what chunk borders
and headers cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.core.scheme import NAMES, Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.segments import VOTE
from gradcomp.reduce.base import Part
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.reduce.partial import PARTIAL, carried
from gradcomp.reduce.pieces import Chunks
from gradcomp.reduce.tree import children

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """Sizes of one bucket: ``payload`` bytes of code, ``dense`` bytes of float32, ``header`` bytes before each message.

    ``cut(count)``: payload bytes of every chunk; an even split without it.
    """

    payload: float
    dense: float
    header: int = 0
    cut: Callable[[int], Sequence[float]] | None = None

    def chunks(self, count: int) -> Numbers:
        """Bytes of ``count`` chunks, headers included."""
        sizes = [self.payload / count] * count if self.cut is None else self.cut(count)
        return self._messages(sizes)

    @property
    def dense_message(self) -> float:
        """Bytes of the bucket as float32, header included."""
        return float(self._messages([self.dense])[0])

    def _messages(self, payloads: Sequence[float]) -> Numbers:
        """Payloads behind headers are padded."""
        sizes = np.asarray(payloads, dtype=np.float64)
        return padded(sizes) + self.header if self.header else sizes


@dataclass(frozen=True)
class Network:
    """Measured constants: seconds a round (``alpha``) and a byte (``beta``) take between hosts, and inside one.

    ``encode_rate``, ``decode_rate``: bytes of float32 a second through the codec. All ranks must hold the same values:
    what follows from them decides which messages they expect.
    """

    alpha: float
    beta: float
    encode_rate: float
    decode_rate: float
    local_alpha: float = 0.0
    local_beta: float = 0.0


@dataclass(frozen=True, eq=False)
class Flow:
    """One round: bytes that each rank sends and receives, to and from other hosts and its own."""

    sent: Numbers
    received: Numbers
    sent_inside: Numbers
    received_inside: Numbers

    def back(self) -> Flow:
        """The same messages the other way."""
        return Flow(self.received, self.sent, self.received_inside, self.sent_inside)

    def seconds(self, hosts: npt.NDArray[np.int64], network: Network) -> float:
        """The time of the busiest link: every host has one to the others, every rank one inside its host."""
        between = max(float(np.bincount(hosts, side).max()) for side in (self.sent, self.received))
        inside = max(float(side.max()) for side in (self.sent_inside, self.received_inside))
        return max(
            network.alpha + network.beta * between if between else 0.0,
            network.local_alpha + network.local_beta * inside if inside else 0.0,
        )


@dataclass(frozen=True, eq=False)
class Cost:
    """What one execution takes.

    ``encodes``: how often a value is encoded on its longest path. ``encoded``, ``decoded``: how much is coded one after
    the other before the last rank is done, in units of the whole bucket; adding float32 counts as decoding.
    """

    flows: Sequence[Flow]
    encodes: int
    encoded: float
    decoded: float

    @property
    def rounds(self) -> int:
        """Rounds on the wire."""
        return len(self.flows)

    def bytes_sent(self) -> Numbers:
        """By rank, headers included."""
        flows: Numbers = np.sum([flow.sent + flow.sent_inside for flow in self.flows], axis=0)
        return flows


def load_of(scheme: Scheme, parts: Sequence[Part], layers: int) -> Load:
    """The sizes of one bucket under this reduction, as they are cut."""
    parts = carried(parts) if scheme.name in PARTIAL else parts
    payload = sum(int(part.codec.wire_bytes(part.group.table).sum()) for part in parts)
    dense = 4 * sum(part.group.elements for part in parts)
    return Load(
        payload, dense, ByteHeader.size(layers), lambda count: Chunks(parts, layers, count).payload_bytes
    )


def cost(scheme: Scheme, load: Load, topology: Topology) -> Cost:
    """What one execution takes for this load among these ranks."""
    if scheme.name == "parameter_server":
        servers = scheme.servers if topology.world > 1 else 1
        return _served(load, topology, servers, scheme.serving(topology.world))
    return _COSTS[scheme.name](load, topology)


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
    """What ``auto`` stands for: on one host scatter-reduce-allgather (thesis, Table 3.4), else what takes least time.

    Equals go to the one that :data:`gradcomp.core.scheme.NAMES` lists first. Reductions that cannot add one of the
    codecs are left out. ``network`` may be missing on one host only.
    """
    if len(topology.leaders) == 1:
        return Scheme("sra")
    assert network is not None, "between hosts, constants must have been measured"
    names = [name for name in NAMES if name not in PARTIAL or not _votes(parts)]
    seconds = {}
    for name in names:
        exact = load_of(Scheme(name), parts, layers)
        even = Load(exact.payload, exact.dense, exact.header)
        seconds[name] = predict(Scheme(name), even, topology, network)
    return Scheme(min(names, key=seconds.__getitem__))


def _votes(parts: Sequence[Part]) -> bool:
    return any(part.codec.kind == VOTE for part in parts)


# --- one function per reduction ------------------------------------------------------------------------------


def _sra(load: Load, topology: Topology) -> Cost:
    return _served(load, topology, topology.world)


def _served(load: Load, topology: Topology, servers: int, silent: int = 0) -> Cost:
    """The first ``silent`` ranks add nothing."""
    world = topology.world
    owned = dict(enumerate(load.chunks(servers).tolist()))
    up = _to_owners(topology, range(silent, world), owned)
    down = _to_owners(topology, range(world), owned).back()
    flows = [up, down] if world > 1 else []
    return Cost(flows, 2, 1 + 1 / servers, (world - silent) / servers + 1)


def _ring(load: Load, topology: Topology) -> Cost:
    world, ranks = topology.world, np.arange(topology.world)
    sizes = load.chunks(world)
    # In round t rank p sends chunk p - 1 - t, and in round t of those that follow chunk p - t.
    firsts = [*(ranks - 1 - t for t in range(world - 1)), *(ranks - t for t in range(world - 1))]
    if (sizes == sizes[0]).all():
        flows = [_to(topology, ranks + 1, sizes)] * len(firsts)
    else:
        flows = [_to(topology, ranks + 1, sizes[first % world]) for first in firsts]
    return Cost(flows, world, 1, (world - 1) / world + 1)


def _tree(load: Load, topology: Topology) -> Cost:
    world, ranks = topology.world, np.arange(topology.world)
    (size,) = load.chunks(1)
    ups, decoded = [], 1.0
    for level in range((world - 1).bit_length()):
        sends = ranks & -ranks == 1 << level
        ups.append(_to(topology, ranks - (1 << level) * sends, size * sends))
        decoded += max(len(children(r, world)) for r in ranks[sends].tolist())
    decoded += len(children(0, world))
    flows = [*ups, *(up.back() for up in reversed(ups))]
    return Cost(flows, 1 + max(r.bit_count() for r in range(world)), len(ups) + 1, decoded)


def _all_to_all(load: Load, topology: Topology) -> Cost:
    world = topology.world
    (size,) = load.chunks(1)
    down = _to_owners(topology, range(world), dict.fromkeys(range(world), size)).back()
    return Cost([down] if world > 1 else [], 1, 1, world + 1)


def _gather(load: Load, topology: Topology) -> Cost:
    world = topology.world
    (size,) = load.chunks(1)
    up = _to_owners(topology, range(world), {0: size})
    down = _to_owners(topology, range(world), {0: load.dense_message}).back()
    return Cost([up, down] if world > 1 else [], 1, 1, world + 1)


def _hierarchical(load: Load, topology: Topology) -> Cost:
    leaders, hosts = topology.leaders, np.asarray(topology.hosts)
    members = np.bincount(hosts)
    sizes = load.chunks(len(leaders))
    between = _to_owners(topology, leaders, dict(zip(leaders, sizes.tolist(), strict=True)))
    flows = [between, between.back()] if len(leaders) > 1 else []
    added = 0.0
    if members.max() > 1:
        to = np.asarray(leaders)[hosts]
        follows = to != np.arange(topology.world)
        up = _to(topology, to, load.dense_message * follows)
        flows = [up, *flows, _to(topology, to, sizes.sum() * follows).back()]
        added = float(members.max())
    return Cost(flows, 2, 1 + 1 / len(leaders), added + 1 + 1)


_COSTS: dict[str, Callable[[Load, Topology], Cost]] = {
    "sra": _sra,
    "ring": _ring,
    "tree": _tree,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "hierarchical": _hierarchical,
}


# --- flows ---------------------------------------------------------------------------------------------------


def _to_owners(topology: Topology, ranks: Sequence[int], owned: dict[int, float]) -> Flow:
    """Each of the ranks sends each owner a message of the bytes that it owns; none to itself."""
    hosts = np.asarray(topology.hosts)
    people = np.zeros(topology.world)
    people[list(ranks)] = 1
    sizes = np.zeros(topology.world)
    sizes[list(owned)] = list(owned.values())
    people_here, owned_here = np.bincount(hosts, people)[hosts], np.bincount(hosts, sizes)[hosts]
    return Flow(
        people * (sizes.sum() - owned_here),
        sizes * (people.sum() - people_here),
        people * (owned_here - sizes),
        sizes * (people_here - people),
    )


def _to(topology: Topology, targets: npt.NDArray[np.int64], sizes: Numbers) -> Flow:
    """Rank r sends ``sizes[r]`` bytes to rank ``targets[r]`` (mod N), nothing to itself."""
    world, hosts = topology.world, np.asarray(topology.hosts)
    targets = targets % world
    sizes = np.where(targets == np.arange(world), 0.0, sizes)
    leaves = hosts[targets] != hosts
    arriving = [
        np.bincount(targets, sizes * kind, minlength=world).astype(np.float64) for kind in (leaves, ~leaves)
    ]
    return Flow(sizes * leaves, arriving[0], sizes * ~leaves, arriving[1])
