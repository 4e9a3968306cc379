"""The alpha-beta model predicts the time of a reduction from the bytes of each rank and round and from its coding."""

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
    """Holds the sizes of one exchange bucket, in bytes.

    ``payload`` is the size of its codes, ``dense`` its size in float32, and ``header`` the header before each message.
    ``cut(count)`` returns the payload bytes of each of ``count`` chunks; without it, chunks are of equal size.
    """

    payload: float
    dense: float
    header: int = 0
    cut: Callable[[int], Sequence[float]] | None = None

    def chunks(self, count: int) -> Numbers:
        """Return the message bytes of each of ``count`` chunks, headers included."""
        sizes = [self.payload / count] * count if self.cut is None else self.cut(count)
        return self._messages(sizes)

    @property
    def dense_message(self) -> float:
        """Return the bytes of the bucket as one message of float32, header included."""
        return float(self._messages([self.dense])[0])

    def _messages(self, payloads: Sequence[float]) -> Numbers:
        sizes = np.asarray(payloads, dtype=np.float64)
        # Payloads are padded only where messages have headers.
        return padded(sizes) + self.header if self.header else sizes


@dataclass(frozen=True)
class Network:
    """Holds the measured constants of the model.

    ``alpha`` is the time of a round and ``beta`` that of a byte, in seconds, between hosts; ``local_alpha`` and
    ``local_beta`` are those inside a host. ``encode_rate`` and ``decode_rate`` are bytes of float32 per second.
    ``overhead`` is the processor's time of a round, in seconds, which other rounds under way do not hide. All ranks
    must have the same values, because the choice of the reduction, and so of the messages, follows from them.
    """

    alpha: float
    beta: float
    encode_rate: float
    decode_rate: float
    local_alpha: float = 0.0
    local_beta: float = 0.0
    overhead: float = 0.0


@dataclass(frozen=True, eq=False)
class Flow:
    """Holds one round's bytes by rank: those exchanged with other hosts, and those ``inside`` the rank's host."""

    sent: Numbers
    received: Numbers
    sent_inside: Numbers
    received_inside: Numbers

    def back(self) -> Flow:
        """Return a round in which the same messages go the other way."""
        return Flow(self.received, self.sent, self.received_inside, self.sent_inside)

    def seconds(self, hosts: npt.NDArray[np.int64], network: Network) -> float:
        """Return the time of the busiest link; a host has one link to other hosts, a rank one inside its host."""
        between = max(float(np.bincount(hosts, side).max()) for side in (self.sent, self.received))
        inside = max(float(side.max()) for side in (self.sent_inside, self.received_inside))
        return max(
            network.alpha + network.beta * between if between else 0.0,
            network.local_alpha + network.local_beta * inside if inside else 0.0,
        )


@dataclass(frozen=True, eq=False)
class Cost:
    """Describes the messages and the coding work of one execution of a reduction.

    ``flows`` has the rounds. ``encodes`` is the number of times that a value is encoded on its longest path.
    ``encoded`` and ``decoded`` are the amounts of coding on the longest path through the ranks, in units of the whole
    bucket; adding float32 counts as decoding.
    """

    flows: Sequence[Flow]
    encodes: int
    encoded: float
    decoded: float

    @property
    def rounds(self) -> int:
        return len(self.flows)

    def bytes_sent(self) -> Numbers:
        """Return the bytes that each rank sends in all rounds, headers included."""
        flows: Numbers = np.sum([flow.sent + flow.sent_inside for flow in self.flows], axis=0)
        return flows


def to_owners(topology: Topology, ranks: Sequence[int], owned: dict[int, float]) -> Flow:
    """Return the round in which each of ``ranks`` sends every other owner r a message of ``owned[r]`` bytes."""
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
    """Return the round in which rank r sends ``sizes[r]`` bytes to rank ``targets[r]`` mod N, but none to itself."""
    world, hosts = topology.world, np.asarray(topology.hosts)
    targets = targets % world
    sizes = np.where(targets == np.arange(world), 0.0, sizes)
    leaves = hosts[targets] != hosts
    arriving = [
        np.bincount(targets, sizes * kind, minlength=world).astype(np.float64) for kind in (leaves, ~leaves)
    ]
    return Flow(sizes * leaves, arriving[0], sizes * ~leaves, arriving[1])
