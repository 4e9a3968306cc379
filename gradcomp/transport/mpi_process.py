"""MPI is initialised in this process, makes communicators among some ranks, and is left in order after a failure."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from time import monotonic, sleep
from typing import Any

import numpy as np

from gradcomp.core.errors import ConfigError, TransportError

logger = logging.getLogger("gradcomp")

#: The tag of the message by which a rank says that it is at exit after a failure; every MPI has tags up to this one.
FAREWELL_TAG = 32767
#: The time that a process waits at exit for the others after a failure; all ranks raise within five seconds.
FAREWELL_SECONDS = 6.0


@dataclass(eq=False)
class MpiProcess:
    """Holds MPI as initialised in this process; every call of ``MPI`` is made under ``lock``."""

    MPI: Any
    lock: AbstractContextManager[Any]
    #: The time of a test that finds nothing: the least that was measured lately.
    idle_seconds: float = 1e-3
    #: The communicators that were given up.
    abandoned: list[Any] = field(default_factory=list)
    #: True if a thread stays inside MPI, so that MPI cannot be finalised.
    stuck: bool = False
    #: Set on a rank that has done its work: it waits this long for ranks that gave up, and does not abort the job.
    patience_seconds: float | None = None

    def communicator(self, ranks: Sequence[int] | None, timeout_seconds: float) -> Any:
        """Make a communicator among these processes (None: all); the call is collective over them."""
        MPI = self.MPI
        world = MPI.COMM_WORLD
        members = list(range(world.size)) if ranks is None else list(ranks)
        if len(set(members)) < len(members) or not set(members) <= set(range(world.size)):
            text = "; start them by mpiexec or mpirun" if world.size == 1 else ""
            raise ConfigError(
                f"ranks {members} are not some of the {world.size} processes that MPI sees{text}"
            )
        if world.rank not in members:
            raise ConfigError(f"rank {world.rank} is not one of {members}, the ranks of the transport")
        made: list[Any] = []

        def make() -> None:
            try:
                with self.lock:
                    comm = world.Create_group(world.group.Incl(members), 0)
                    comm.Set_errhandler(MPI.ERRORS_RETURN)
                made.append(comm)
            except MPI.Exception as error:
                made.append(error)

        # Create_group waits until all ranks have called it, without a deadline; hence the thread.
        thread = threading.Thread(target=make, name="gradcomp-meet", daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        if not made:
            self.stuck = True
            raise TransportError(f"ranks {members} did not all meet within {timeout_seconds:g} s")
        if isinstance(made[0], MPI.Exception):
            raise TransportError(f"MPI could not connect ranks {members}: {reason(made[0])}") from made[0]
        return made[0]


def mpi_process(world: int | None = None) -> MpiProcess:
    """Load MPI, and initialise it if the program has not; ConfigError if it cannot be used.

    ``world`` is the number of processes that the launcher has started.
    """
    process = _start()
    if process.MPI.Is_finalized():
        raise ConfigError("this process has finalised MPI: the mpi transport cannot be used any more")
    seen = process.MPI.COMM_WORLD.size
    if world is not None and world != seen:
        raise ConfigError(
            f"the job has {world} processes, MPI sees {seen}: start them by the mpiexec or mpirun of the MPI that "
            "mpi4py uses, or choose another transport"
        )
    return process


def load() -> Any:
    """Import ``mpi4py.MPI`` without initialising it; ImportError or RuntimeError, with the reason, if that fails."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        # The library is checked below before it is initialised: it ends the process if it cannot start.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    if not MPI.Is_initialized() and "PMIX_NAMESPACE" in os.environ:
        library = MPI.Get_library_version()  # the text includes the options of its build
        if "MPICH" in library and "pmix" not in library.lower():
            raise RuntimeError(
                "mpi4py has loaded an MPICH without PMIx, but another MPI started the ranks, by PMIx"
            )
    return MPI


def initialise(MPI: Any) -> None:
    """Initialise MPI if the program has not, with the level of ``mpi4py.rc``: by default, MPI_THREAD_MULTIPLE."""
    import mpi4py

    if not MPI.Is_initialized():
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
        atexit.register(_finalize, MPI)


@cache
def _start() -> MpiProcess:
    try:
        MPI = load()
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no MPI library
        text = str(error).replace("\n", "; ")
        raise ConfigError(
            f"the mpi transport needs mpi4py and an MPI library: pip install gradcomp[mpi] ({text})"
        ) from error
    initialise(MPI)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        name = "MPI_THREAD_FUNNELED" if level == MPI.THREAD_FUNNELED else "MPI_THREAD_SINGLE"
        raise ConfigError(
            f"the mpi transport needs MPI_THREAD_MULTIPLE or MPI_THREAD_SERIALIZED, this process's MPI has {name}: "
            "set mpi4py.rc.thread_level before MPI is initialised"
        )
    process = MpiProcess(MPI, threading.RLock() if level == MPI.THREAD_SERIALIZED else nullcontext())
    atexit.register(_leave, process)
    return process


def reason(error: Any) -> str:
    """Return MPI's description of an error, without the calls that led to it."""
    return str(error.Get_error_string()).partition("\n")[0]


def _finalize(MPI: Any) -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


def _leave(process: MpiProcess) -> None:
    """Wait at exit for the other ranks after a failure; end the job by MPI_Abort if one does not come in time.

    If a thread is still inside MPI, it aborts at once. MPI_Finalize would wait for ever for a rank that is stopped. A
    rank that has done its work only waits, because it must not abort a rank that is still saving.
    """
    if process.MPI.Is_finalized() or not (process.abandoned or process.stuck):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if process.patience_seconds is not None and not process.stuck:
        _all_leave(process, process.patience_seconds)
    elif process.stuck or not _all_leave(process, FAREWELL_SECONDS):
        process.MPI.COMM_WORLD.Abort(1)


def _all_leave(process: MpiProcess, seconds: float) -> bool:
    """Wait until all ranks of all abandoned communicators are at exit; return false if MPI fails or time is up."""
    nothing = np.empty(0, dtype=np.uint8)
    deadline = monotonic() + seconds
    try:
        messages = []
        for comm in process.abandoned:
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            messages += [comm.Irecv(nothing, rank, FAREWELL_TAG) for rank in others]
            messages += [comm.Isend(nothing, rank, FAREWELL_TAG) for rank in others]
        while not process.MPI.Request.Testall(messages):
            if monotonic() > deadline:
                return False
            sleep(5e-3)
    except process.MPI.Exception as error:
        logger.debug("at exit: %s", reason(error))
        return False
    return True
