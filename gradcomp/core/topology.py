"""The topology of a world: which host each rank is on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """Maps ranks to hosts: ``hosts[r]`` is the number of rank r's host, by order of first ranks.

    Hosts may have any number.

    The first rank of a host is its leader. ``reduces_inside`` says that the transport has an engine inside each host
    that sums to one of its ranks.
    """

    hosts: tuple[int, ...]
    reduces_inside: bool = False

    @staticmethod
    def of(names: Sequence[str]) -> Topology:
        """Returns the topology of ranks whose hosts have these names, in rank order."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Topology(tuple(numbers[name] for name in names))

    @staticmethod
    def one_host(world: int) -> Topology:
        """Returns the topology of ``world`` ranks on one host."""
        return Topology((0,) * world)

    @property
    def world(self) -> int:
        return len(self.hosts)

    @cached_property
    def _by_host(self) -> tuple[tuple[int, ...], ...]:
        """Every host's ranks; made once, since searching for them host by host takes N^2 steps."""
        found: list[list[int]] = [[] for _ in range(max(self.hosts) + 1)]
        for rank, host in enumerate(self.hosts):
            found[host].append(rank)
        return tuple(map(tuple, found))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Returns the first rank of every host."""
        return tuple(ranks[0] for ranks in self._by_host)

    def leaders_in_turn(self, turn: int) -> tuple[int, ...]:
        """Returns one rank of every host, in order of the hosts: the ranks of a host take turns."""
        return tuple(ranks[turn % len(ranks)] for ranks in self._by_host)

    def members(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks on the host of ``rank``, itself included."""
        return self._by_host[self.hosts[rank]]

    @property
    def has_two_levels(self) -> bool:
        """Returns whether there are several hosts, of which one or more have several ranks."""
        return 1 < len(self._by_host) < self.world

    def served(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns, for each member of this rank's host, the ranks that it serves inside its host, in rank order.

        A member serves itself and, of each other host, the ranks at its own place there, modulo the number of members.
        """
        members = self.members(rank)
        served = [self.members(each).index(each) % len(members) for each in range(self.world)]
        return tuple(
            tuple(each for each in range(self.world) if served[each] == place)
            for place in range(len(members))
        )

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """Returns the rank of every other host that serves this rank there, in order of hosts; see :meth:`served`."""
        place = self.members(rank).index(rank)
        return tuple(
            ranks[place % len(ranks)] for host, ranks in enumerate(self._by_host) if host != self.hosts[rank]
        )

    def among(self, ranks: Sequence[int]) -> Topology:
        """Returns the topology of some of the ranks, renumbered in the given order."""
        return Topology.of([str(self.hosts[rank]) for rank in ranks])
