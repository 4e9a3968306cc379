"""The alpha-beta model: what one execution of a reduction sends, by rank and round, and how much it codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.core.topology import Topology
from gradcomp.reduce.header import padded

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


def to_owners(topology: Topology, ranks: Sequence[int], owned: dict[int, float]) -> Flow:
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


def to(topology: Topology, targets: npt.NDArray[np.int64], sizes: Numbers) -> Flow:
    """Rank r sends ``sizes[r]`` bytes to rank ``targets[r]`` (mod N), nothing to itself."""
    world, hosts = topology.world, np.asarray(topology.hosts)
    targets = targets % world
    sizes = np.where(targets == np.arange(world), 0.0, sizes)
    leaves = hosts[targets] != hosts
    arriving = [
        np.bincount(targets, sizes * kind, minlength=world).astype(np.float64) for kind in (leaves, ~leaves)
    ]
    return Flow(sizes * leaves, arriving[0], sizes * ~leaves, arriving[1])
