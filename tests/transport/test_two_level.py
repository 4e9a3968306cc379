"""Two transports as one, in process over every shape of hosts; the contract suite has shared memory under Gloo."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_memory import sum_in_rank_order
from tiers import examples

from gradcomp import ConfigError, TransportError
from gradcomp.core.topology import Topology
from gradcomp.transport.inprocess import World
from gradcomp.transport.two_level import TwoLevelTransport

SHAPES = [
    (0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2), (0, 1, 2), (0, 1, 2, 0, 0, 1, 3),
]  # fmt: skip


def two_levels(
    hosts: tuple[int, ...], seed: int | None = None
) -> tuple[list[TwoLevelTransport], list[World]]:
    """One transport per rank; with a seed, every completion is held back for a random number of polls."""
    rng = random.Random(seed)

    def delay(rank: int, number: int, polls: int) -> bool:
        return seed is not None and polls < rng.randrange(12)

    topology = Topology(hosts)
    remote = World(topology.world, delay)
    leaders = World(len(topology.leaders), delay)
    local = [World(hosts.count(host), delay) for host in range(len(topology.leaders))]
    back = [World(hosts.count(host), delay) for host in range(len(topology.leaders))]
    made = []
    for rank, host in enumerate(hosts):
        place = topology.members(rank).index(rank)
        made.append(
            TwoLevelTransport(
                local[host].transports()[place],
                remote.transports()[rank],
                topology,
                leaders.transports()[topology.leaders.index(rank)] if rank in topology.leaders else None,
                back[host].transports()[place],
            )
        )
    return made, [remote, leaders, *local, *back]


def settle(handles, rng: random.Random | None = None) -> None:
    """Poll in random order, so that ranks reach their phases at different times."""
    rng = rng or random.Random(0)
    waiting = list(handles)
    for _ in range(100_000):
        if not waiting:
            return
        one = rng.choice(waiting)
        if one.poll():
            waiting.remove(one)
    raise AssertionError("the handles do not complete")


@pytest.mark.parametrize("hosts", SHAPES)
def test_allreduce_sums_over_hosts_and_counts_its_bytes(hosts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    ranks, _ = two_levels(hosts)
    parts = [rng.standard_normal(60).astype(np.float32) for _ in hosts]
    arrays = [part.copy() for part in parts]
    settle([rank.allreduce(array) for rank, array in zip(ranks, arrays, strict=True)])
    inside = [
        sum_in_rank_order([p for p, h in zip(parts, hosts, strict=True) if h == host])
        for host in range(max(hosts) + 1)
    ]
    for array in arrays:
        assert array.tobytes() == sum_in_rank_order(inside).tobytes()
    count, topology = max(hosts) + 1, Topology(hosts)
    for rank, transport in enumerate(ranks):
        leads = rank in topology.leaders
        assert transport.bytes_between_hosts == (2 * 240 * (count - 1) // count if leads else 0)
        members = hosts.count(hosts[rank])
        back = (members - 1) * 240 if leads and count > 1 else 0
        assert (
            transport.bytes_sent - transport.bytes_between_hosts == 2 * 240 * (members - 1) // members + back
        )


@pytest.mark.parametrize("hosts", SHAPES)
def test_messages_take_the_transport_of_their_ranks(hosts: tuple[int, ...]) -> None:
    size = len(hosts)
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 9, (size, size))
    parts = [[rng.integers(0, 256, n, dtype=np.uint8) for n in row] for row in counts]
    received = [np.zeros(column.sum(), np.uint8) for column in counts.T]
    ranks, _ = two_levels(hosts)
    settle(
        rank.alltoallv(np.concatenate(parts[r]), counts[r].tolist(), received[r], counts[:, r].tolist())
        for r, rank in enumerate(ranks)
    )
    for r, rank in enumerate(ranks):
        assert received[r].tobytes() == b"".join(parts[s][r].tobytes() for s in range(size))
        away = [n for n, host in zip(counts[r], hosts, strict=True) if host != hosts[r]]
        assert rank.bytes_between_hosts == sum(away)
        assert rank.bytes_sent == counts[r].sum() - counts[r, r]


@pytest.mark.parametrize("hosts", SHAPES)
def test_all_gather_sends_each_part_to_each_rank(hosts: tuple[int, ...]) -> None:
    size = len(hosts)
    counts = [5, 0, 3, 7, 1, 2, 4][:size]
    whole = np.random.default_rng(2).integers(0, 256, sum(counts), dtype=np.uint8)
    ends = np.cumsum(counts)
    buffers = [np.zeros(len(whole), np.uint8) for _ in hosts]
    for r, buffer in enumerate(buffers):
        buffer[ends[r] - counts[r] : ends[r]] = whole[ends[r] - counts[r] : ends[r]]
    ranks, _ = two_levels(hosts)
    settle(rank.allgatherv(buffer, counts) for rank, buffer in zip(ranks, buffers, strict=True))
    for r, rank in enumerate(ranks):
        assert buffers[r].tobytes() == whole.tobytes()
        assert rank.bytes_sent == (size - 1) * counts[r]
        assert rank.bytes_between_hosts == (size - hosts.count(hosts[r])) * counts[r]


@examples(60)
@given(
    st.sampled_from(SHAPES),
    st.lists(st.sampled_from(["sum", "message"]), min_size=1, max_size=8),
    st.integers(0, 99),
)
def test_whenever_phases_end_all_ranks_issue_the_same_in_the_same_order(hosts, kinds, seed: int) -> None:
    """Random delays on every transport, random polls: an order that differed would mix the collectives up."""
    ranks, _ = two_levels(hosts, seed)
    size = len(hosts)
    handles, sums, gathered = [], [], []
    for number, kind in enumerate(kinds):
        for r, rank in enumerate(ranks):
            if kind == "sum":
                sums.append(
                    (np.full(number + 1, r + number, np.float64), size * number + size * (size - 1) / 2)
                )
                handles.append(rank.allreduce(sums[-1][0]))
            else:
                gathered.append(np.zeros(2 * size, np.uint8))
                gathered[-1][2 * r : 2 * r + 2] = r + 1
                handles.append(rank.allgatherv(gathered[-1], [2] * size))
    settle(handles, random.Random(seed))
    assert all((array == want).all() for array, want in sums)
    assert all((array == np.repeat(np.arange(size) + 1, 2)).all() for array in gathered)


def test_a_rank_that_leaves_fails_the_others() -> None:
    ranks, worlds = two_levels((0, 0, 1, 1))
    for world in (worlds[0], worlds[3], worlds[5]):  # rank 3, wherever it is
        world.kill(3 if world.size == 4 else 1)
    arrays = [np.ones(4, np.float32) for _ in ranks]
    handles = [rank.allreduce(array) for rank, array in zip(ranks[:3], arrays, strict=False)]
    with pytest.raises(TransportError, match="left"):
        settle(handles[2:])
    with pytest.raises(TransportError, match="left"):
        settle([ranks[0].allgatherv(np.zeros(4, np.uint8), [1] * 4)])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"topology": Topology((0, 0, 0))}, "topology has 3 ranks"),
        ({"leaders": None}, "is a leader"),
        ({"local": 3}, "local has this rank as 0 of 3"),
        ({"back": 3}, "back has this rank as 0 of 3"),
        ({"leaders": 3}, "leaders has this rank as 0 of 3"),
        ({"rank": 1}, "is no leader"),
    ],
)
def test_transports_must_fit_the_topology(wrong, error: str) -> None:
    sizes = {"local": 2, "remote": 4, "leaders": 2, "back": 2, "topology": Topology((0, 0, 1, 1)), **wrong}
    rank = sizes.pop("rank", 0)
    made = {
        name: World(size).transports()[rank] if isinstance(size, int) else size
        for name, size in sizes.items()
    }
    with pytest.raises(ConfigError, match=error):
        TwoLevelTransport(**made)
