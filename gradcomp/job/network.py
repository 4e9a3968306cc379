"""Defines ``Network``, through which a job's ranks meet, the one over MPI alone, and the transports among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gradcomp.core.errors import ConfigError
from gradcomp.job.launch import Launch, Ranks, discover
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel, Prefixed
from gradcomp.transport.mpi import MpiTransport
from gradcomp.transport.mpi_process import MpiControl, mpi_process

if TYPE_CHECKING:
    from gradcomp.job.generations import Member
    from gradcomp.job.state import Runtime


class Network(ABC):
    """Connects the ranks of one job.

    ``ranks``: the engine's own numbers of them; rank i of the job is the engine's ``ranks[i]``. ``engine``: the
    transport that :meth:`group` makes, by its name in the settings.
    """

    engine: str
    ranks: Ranks
    #: True if processes outside the job may write what :meth:`control` reads, so that values must be signed.
    exposed: bool = False
    #: The part of this process in an elastic job, whose ranks may change; None in any other job.
    member: Member | None = None
    #: This process's number in the job.
    rank: int

    @abstractmethod
    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        """Make a communicator. Collective over ``ranks``, which are numbered as in the job."""

    @abstractmethod
    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        """Connect to the job's small values. Local. Each ``life``, from init to shutdown, has its own values."""

    def members(self, group: Any) -> Ranks | None:
        """Return the ranks of a group made with the engine, or None for other objects.

        ConfigError for a group with ranks outside the job.
        """
        return None

    def finish(self, timeout_seconds: float) -> None:  # noqa: B027 - most engines can be left at any time
        """Record that this rank has ended without an error: it waits for the others, and its end must not end them."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the engine's resources. Communicators were closed or abandoned before."""

    def describe(self) -> str:
        """Return the engine with its version, for the log."""
        return self.engine


class Alone(Network):
    """Stands for a world of one, in which nothing is exchanged."""

    engine = "none"
    ranks = (0,)
    rank = 0

    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        raise AssertionError("a world of one exchanges nothing")

    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        raise AssertionError("a world of one exchanges nothing")


def join(timeout_seconds: float) -> tuple[Launch, Network]:
    """Meet the processes that ``mpirun``, ``mpiexec`` or ``srun`` started.

    Collective. ConfigError without MPI, where MPI and the launcher disagree about the processes, and for a half-set
    environment; TransportError if the ranks do not meet in time.
    """
    launch = discover()
    if launch.size == 1:
        return launch, Alone()
    world = mpi_process(launch.size).MPI.COMM_WORLD
    if world.rank != launch.rank:
        raise ConfigError(
            f"MPI numbers the ranks differently: its rank {world.rank} is rank {launch.rank} for {launch.launcher}"
        )
    return launch, MpiNetwork(launch.rank, launch.size, timeout_seconds)


class MpiNetwork(Network):
    """Connects all processes of MPI_COMM_WORLD. Construction is collective."""

    engine = "mpi"

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        self.ranks = tuple(range(size))
        self.rank = rank
        # Making one is collective over all ranks. Later only ranks that need one would come, so all share this one.
        self._control = MpiControl(None, timeout_seconds, world=size)

    def group(self, ranks: Ranks, timeout_seconds: float) -> MpiTransport:
        return MpiTransport(None if ranks == self.ranks else ranks, timeout_seconds, world=len(self.ranks))

    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        """Return a view, with keys of this life, of the control channel that all lives share."""
        return Prefixed(self._control, str(life))

    def finish(self, timeout_seconds: float) -> None:
        mpi_process().patience_seconds = timeout_seconds

    def describe(self) -> str:
        """Return the MPI library's own name and version."""
        told = str(mpi_process().MPI.Get_library_version()).partition("\n")[0].partition(",")[0]
        return " ".join(told.strip("\0").split())


# ---- the transport that the settings name; engines are imported in functions, as only the one in use is there


def make_transport(state: Runtime, ranks: Ranks) -> Transport:
    """Make a communicator of its own for an exchanger. Collective over ``ranks``.

    ConfigError, on all of them, where shared memory would have to reach another host, and where an engine is missing:
    it then says which extra to install.
    """
    inside, _, between = state.config.transport.rpartition("+")
    if inside:
        return _two_levels(state, ranks, inside, between)
    return _flat(state, ranks, between)


def _flat(state: Runtime, ranks: Ranks, name: str) -> Transport:
    if name == state.network.engine:
        return state.make_group(ranks)
    there = [state.network.ranks[rank] for rank in ranks]
    if name == "shm":
        return _shared_memory(state, ranks)
    if name == "mpi":
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


def _two_levels(state: Runtime, ranks: Ranks, inside: str, between: str) -> Transport:
    from gradcomp.transport.two_level import TwoLevelTransport

    topology = state.topology.among(ranks)
    place = ranks.index(state.rank)
    members = tuple(ranks[i] for i in topology.members(place))
    leaders = tuple(ranks[i] for i in topology.leaders)
    return TwoLevelTransport(
        _flat(state, members, inside),
        _flat(state, ranks, between),
        topology,
        _flat(state, leaders, between) if state.rank in leaders else None,
        # Not over NCCL: the order of operations on two communicators differs between ranks, and one stream runs them
        # in order, so that ranks would wait for each other.
        _shared_memory(state, members),
    )
