"""MPI in this process: how it is started, how some ranks meet, how it is left after a failure."""

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

#: The tag that says that a rank is about to end after a failure; the largest that every MPI has.
FAREWELL_TAG = 32767
#: How long a process waits at exit for the others after a failure of its own: every rank raises within five seconds.
FAREWELL_SECONDS = 6.0


@dataclass(eq=False)
class MpiProcess:
    """MPI as this process has it. Every call of ``MPI`` is made under ``lock``."""

    MPI: Any
    lock: AbstractContextManager[Any]
    #: What a test of a request takes that finds nothing: the least seen of late.
    idle_seconds: float = 1e-3
    #: Communicators that were given up.
    abandoned: list[Any] = field(default_factory=list)
    #: A thread stays inside MPI: no orderly end.
    stuck: bool = False
    #: This rank has done its work: it waits so long for those that gave up, and ends none of them.
    patience_seconds: float | None = None

    def communicator(self, ranks: Sequence[int] | None, timeout_seconds: float) -> Any:
        """A communicator among these processes of the job (None: all), made by them together."""
        MPI = self.MPI
        world = MPI.COMM_WORLD
        members = list(range(world.size)) if ranks is None else list(ranks)
        if len(set(members)) < len(members) or not set(members) <= set(range(world.size)):
            text = "; start them by mpiexec or mpirun" if world.size == 1 else ""
            raise ConfigError(
                f"ranks {members} are not some of the {world.size} processes that MPI sees{text}"
            )
        if world.rank not in members:
            raise ConfigError(f"rank {world.rank} is not one of {members}")
        made: list[Any] = []

        def make() -> None:
            try:
                with self.lock:
                    comm = world.Create_group(world.group.Incl(members), 0)
                    comm.Set_errhandler(MPI.ERRORS_RETURN)
                made.append(comm)
            except MPI.Exception as error:
                made.append(error)

        # It waits inside MPI until all have come, and MPI knows no deadline.
        thread = threading.Thread(target=make, name="gradcomp-meet", daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        if not made:
            self.stuck = True
            raise TransportError(f"ranks {members} did not all meet within {timeout_seconds:g} s")
        if isinstance(made[0], MPI.Exception):
            raise TransportError(f"the ranks could not meet: {reason(made[0])}") from made[0]
        return made[0]


def mpi_process(world: int | None = None) -> MpiProcess:
    """Load MPI, initialise it where the program has not; ConfigError if it cannot serve.

    ``world``: how many processes the job has by its launcher's account.
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
    """``mpi4py.MPI``, perhaps not initialised yet. ImportError or RuntimeError, which say why, if it cannot serve."""
    import mpi4py

    if (
        "mpi4py.MPI" not in sys.modules
    ):  # look at the library before it starts: it ends the process if it cannot
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    if not MPI.Is_initialized() and "PMIX_NAMESPACE" in os.environ:
        library = MPI.Get_library_version()  # with the options that it was built with
        if "MPICH" in library and "pmix" not in library.lower():
            raise RuntimeError("it has loaded MPICH, but another MPI started the ranks, by PMIx")
    return MPI


def initialise(MPI: Any) -> None:
    """Start MPI where nobody has, with the threads that ``mpi4py.rc`` asks for: as a rule, MPI_THREAD_MULTIPLE."""
    import mpi4py

    if not MPI.Is_initialized():
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
        atexit.register(_finalize, MPI)


@cache
def _start() -> MpiProcess:
    try:
        MPI = load()
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
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
    """MPI's words without the calls that led there."""
    return str(error.Get_error_string()).partition("\n")[0]


def _finalize(MPI: Any) -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


def _leave(process: MpiProcess) -> None:
    """At exit, after a failure: wait for the others, since MPI_Finalize would wait for ever for one that is stopped.

    A rank that itself has done its work leaves it at that wait: it must not end one that still saves what it has.
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
    """Whether all ranks of all abandoned communicators have got as far as this one, within so many seconds."""
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
