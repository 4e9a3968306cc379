"""Makes the transport that the settings name, for some of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradcomp.core.errors import ConfigError
from gradcomp.job.launch import Ranks
from gradcomp.job.state import Runtime
from gradcomp.transport.base import Transport

# Engines are imported in functions, so that only the one that is used must be installed.


def make_transport(state: Runtime, ranks: Ranks) -> Transport:
    """Make a communicator of its own for an exchanger. Collective over ``ranks``.

    ConfigError, on all of them, where shared memory would have to reach another host, and where an engine is missing:
    it then says which extra to install.
    """
    inside, _, between = state.config.transport.rpartition("+")
    if inside:
        return _two_levels(state, ranks, between)
    return _flat(state, ranks, between)


def _flat(state: Runtime, ranks: Ranks, name: str) -> Transport:
    if name == state.network.engine:
        return state.make_group(ranks)
    there = [state.network.ranks[rank] for rank in ranks]
    if name == "shm":
        return _shared_memory(state, ranks)
    if name == "mpi":
        from gradcomp.transport.mpi import MpiTransport

        mpi = MpiTransport(there, state.config.timeout_seconds, world=state.launch.size)
        return _in_order(mpi, ranks.index(state.rank), "MPI")
    if name == "horovod":
        from gradcomp.transport.horovod import HorovodTransport

        return _in_order(HorovodTransport(there), ranks.index(state.rank), "Horovod")
    if name == "nccl":
        return _nccl(state, ranks)
    raise ConfigError(f"transport={name}, but the ranks met through {state.network.engine}")


def _in_order(transport: Transport, rank: int, engine: str) -> Transport:
    if transport.rank != rank:
        raise ConfigError(
            f"{engine} numbers the ranks differently: its rank {transport.rank} is rank {rank} here"
        )
    return transport


def _shared_memory(state: Runtime, ranks: Ranks) -> Transport:
    from gradcomp.transport.shm import ShmTransport

    hosts = state.topology.among(ranks).leaders
    if len(hosts) > 1:
        raise ConfigError(
            f"transport=shm serves one host, and these ranks are on {len(hosts)}; take shm+torch or shm+mpi"
        )
    if len(ranks) == 1:
        return ShmTransport(0, 1, lambda mine: [mine])
    with _meeting(state, ranks) as meeting:
        return ShmTransport(meeting.rank, meeting.size, meeting.allgather_bytes)


def _nccl(state: Runtime, ranks: Ranks) -> Transport:
    from gradcomp.transport.nccl import nccl_transport

    with _meeting(state, ranks) as meeting:
        return nccl_transport(
            meeting.rank, meeting.size, meeting.allgather_bytes, state.config.timeout_seconds
        )


@contextmanager
def _meeting(state: Runtime, ranks: Ranks) -> Iterator[Transport]:
    """Yield a group in which ranks tell each other where to meet, and that is closed afterwards."""
    group = state.make_group(ranks)
    try:
        yield group
    finally:
        group.close()


def _two_levels(state: Runtime, ranks: Ranks, between: str) -> Transport:
    from gradcomp.transport.two_level import TwoLevelTransport

    topology = state.topology.among(ranks)
    place = ranks.index(state.rank)
    members = tuple(ranks[i] for i in topology.members(place))
    leaders = tuple(ranks[i] for i in topology.leaders)
    return TwoLevelTransport(
        _shared_memory(state, members),
        _flat(state, ranks, between),
        topology,
        _flat(state, leaders, between) if state.rank in leaders else None,
        _shared_memory(state, members),
    )
