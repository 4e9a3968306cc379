"""Lets the ranks of a job meet through MPI alone, without any other engine."""

from __future__ import annotations

from gradcomp.core.errors import ConfigError
from gradcomp.job.launch import Launch, discover
from gradcomp.job.network import Alone, Network, Ranks
from gradcomp.transport.control import ControlChannel, Prefixed
from gradcomp.transport.mpi import MpiTransport
from gradcomp.transport.mpi_control import MpiControl
from gradcomp.transport.mpi_process import mpi_process


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
