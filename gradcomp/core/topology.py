"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """``hosts[r]``: the number of rank r's host. Hosts are numbered by their first ranks; any number of ranks on each.

    The first rank of a host is its leader.
    """

    hosts: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str]) -> Topology:
        """The topology of ranks whose hosts have these names, in rank order."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Topology(tuple(numbers[name] for name in names))

    @staticmethod
    def one_host(world: int) -> Topology:
        """``world`` ranks on one host."""
        return Topology((0,) * world)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every host."""
        return tuple(self.hosts.index(host) for host in range(max(self.hosts) + 1))

    def leaders_in_turn(self, turn: int) -> tuple[int, ...]:
        """One rank of every host, in order of the hosts: the ranks of a host take turns."""
        members = [self.members(leader) for leader in self.leaders]
        return tuple(ranks[turn % len(ranks)] for ranks in members)

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``, itself included."""
        return tuple(r for r, host in enumerate(self.hosts) if host == self.hosts[rank])

    def among(self, ranks: Sequence[int]) -> Topology:
        """The topology of some of the ranks, numbered anew in the given order."""
        return Topology.of([str(self.hosts[rank]) for rank in ranks])
