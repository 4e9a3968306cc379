"""Which ranks share a host."""

from __future__ import annotations

import pytest

from gradcomp.core.topology import Topology


def test_hosts_are_numbered_by_their_first_ranks():
    topology = Topology.of(["b", "a", "b", "c", "a"])
    assert topology.hosts == (0, 1, 0, 2, 1)
    assert topology.leaders == (0, 1, 3)
    assert [topology.members(rank) for rank in range(5)] == [(0, 2), (1, 4), (0, 2), (3,), (1, 4)]


def test_some_of_the_ranks_are_numbered_anew():
    topology = Topology.of(["a", "b", "b", "c"]).among([3, 2, 1])
    assert topology.hosts == (0, 1, 1)
    assert topology.world == 3


def test_the_ranks_of_a_host_take_turns():
    topology = Topology((0, 1, 0, 2, 1, 1))
    turns = [topology.leaders_in_turn(turn) for turn in range(4)]
    assert turns == [topology.leaders, (2, 4, 3), (0, 5, 3), (2, 1, 3)]


def test_one_host():
    assert Topology.one_host(3).leaders == (0,)
    assert Topology.one_host(1).members(0) == (0,)


@pytest.mark.parametrize(
    "hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1), (0, 1, 0, 2, 2, 1, 1)]
)
def test_every_rank_is_served_once_on_each_host(hosts: tuple[int, ...]):
    topology = Topology(hosts)
    assert topology.has_two_levels
    for rank in range(topology.world):
        members, served = topology.members(rank), topology.served(rank)
        assert sorted(each for group in served for each in group) == list(range(topology.world))
        for member, group in zip(members, served, strict=True):
            assert member in group
            assert list(group) == sorted(group)
            for each in set(group) - {member}:
                assert member in topology.counterparts(each)
        assert len(topology.counterparts(rank)) == len(topology.leaders) - 1


def test_equal_hosts_serve_equally_and_single_ranks_have_one_level():
    assert Topology((0, 0, 1, 1)).served(3) == ((0, 2), (1, 3))
    assert Topology((0, 0, 1, 1)).counterparts(1) == (3,)
    assert Topology((0, 0, 0, 1)).served(0) == ((0, 3), (1,), (2,))
    assert not any(Topology(hosts).has_two_levels for hosts in [(0,), (0, 0), (0, 1, 2)])


def test_the_hosts_of_many_ranks_are_found_without_comparing_every_rank_with_every_host():
    compared = 0

    class Host(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    topology = Topology(tuple(Host(rank // 8) for rank in range(512)))
    assert topology.leaders_in_turn(3) == tuple(range(3, 512, 8))
    assert topology.leaders == tuple(range(0, 512, 8))
    assert topology.members(13) == tuple(range(8, 16))
    assert compared == 0
