"""MPI in this process: how it starts, how ranks meet and exchange small values, and how a failed job leaves it."""

from __future__ import annotations

import atexit
import logging
import os
import struct
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
from gradcomp.transport.base import in_time
from gradcomp.transport.control import ControlChannel

logger = logging.getLogger("gradcomp")

#: The tag of the message by which a rank says that it is at exit after a failure; every MPI has tags up to this one.
FAREWELL_TAG = 32767
#: The time that a process waits at exit for the others after a failure; all ranks raise within five seconds.
FAREWELL_SECONDS = 6.0

#: The largest message; those of the exchanger and of users are far smaller.
MOST_VALUE_BYTES = 1 << 20
#: The head of a message: the Lamport clock at which its value was published, and the length of its key.
_HEAD = struct.Struct("<QI")


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

        def make() -> Any:
            with self.lock:
                comm = world.Create_group(world.group.Incl(members), 0)
                comm.Set_errhandler(MPI.ERRORS_RETURN)
            return comm

        try:
            communicator = in_time(make, timeout_seconds, "gradcomp-meet")
        except MPI.Exception as error:
            raise TransportError(f"MPI could not connect ranks {members}: {reason(error)}") from error
        if communicator is None:
            self.stuck = True
            raise TransportError(f"ranks {members} did not all meet within {timeout_seconds:g} s")
        return communicator


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
        atexit.register(lambda: MPI.Is_finalized() or MPI.Finalize())


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
            messages += [comm.Irecv(nothing, rank, FAREWELL_TAG) for rank in _others(comm)]
            messages += [comm.Isend(nothing, rank, FAREWELL_TAG) for rank in _others(comm)]
        while not process.MPI.Request.Testall(messages):
            if monotonic() > deadline:
                return False
            sleep(5e-3)
    except process.MPI.Exception as error:
        logger.debug("at exit: %s", reason(error))
        return False
    return True


def _others(comm: Any) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


class MpiControl(ControlChannel):
    """Keeps every value on every rank: publishing sends it to all ranks, and a lookup first takes what has arrived.

    No call blocks. If a key gets two values, all ranks end with the one that is later by a Lamport clock, or from the
    higher rank if the clocks are equal. So a rank that publishes after it has seen another rank's value replaces that
    value everywhere, in whatever order they arrive.

    Construction is collective over ``ranks`` (None: all), on a communicator of its own. A rank that is killed ends the
    job through the launcher. A rank that is stopped sends nothing, which a lookup cannot tell from having published
    nothing.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, timeout_seconds: float = 600.0, *, world: int | None = None
    ) -> None:
        self._process = mpi_process(world)
        self._comm = self._process.communicator(ranks, timeout_seconds)
        self._clock = 0
        self._values: dict[str, tuple[int, int, bytes]] = {}
        self._sent: list[tuple[Any, bytes]] = []
        self._arriving: tuple[Any, bytearray, int] | None = None
        self._one_thread = threading.Lock()

    def publish(self, key: str, value: bytes) -> None:
        name = key.encode()
        assert _HEAD.size + len(name) + len(value) <= MOST_VALUE_BYTES, f"{key}: {len(value)} bytes"
        with self._one_thread:
            self._receive()
            self._clock += 1
            self._take(key, self._clock, self._comm.rank, value)
            message = _HEAD.pack(self._clock, len(name)) + name + value
            MPI = self._process.MPI
            try:
                with self._process.lock:
                    self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
                    for rank in _others(self._comm):
                        self._sent.append((self._comm.Isend([message, MPI.BYTE], rank, 0), message))
            except MPI.Exception as error:
                raise TransportError(f"{key} could not be published over MPI: {reason(error)}") from error

    def lookup(self, key: str) -> bytes | None:
        with self._one_thread:
            self._receive()
            found = self._values.get(key)
            return None if found is None else found[2]

    def _receive(self) -> None:
        """Store the values of all messages that have arrived."""
        MPI = self._process.MPI
        try:
            with self._process.lock:
                while (arriving := self._arriving or self._probe()) is not None:
                    request, message, source = self._arriving = arriving
                    if not request.Test():
                        return
                    self._arriving = None
                    clock, length = _HEAD.unpack_from(message)
                    name, value = message[_HEAD.size :][:length], bytes(message[_HEAD.size + length :])
                    if len(name) != length:
                        raise TransportError(f"rank {source} published a message that ends within its key")
                    self._clock = max(self._clock, clock)
                    self._take(name.decode(errors="replace"), clock, source, value)
        except MPI.Exception as error:
            raise TransportError(f"the control channel over MPI failed: {reason(error)}") from error

    def _probe(self) -> tuple[Any, bytearray, int] | None:
        MPI = self._process.MPI
        status = MPI.Status()
        found = self._comm.Improbe(MPI.ANY_SOURCE, 0, status)
        if found is None:
            return None
        length, source = status.Get_count(MPI.BYTE), status.Get_source()
        if not _HEAD.size <= length <= MOST_VALUE_BYTES:
            raise TransportError(
                f"rank {source} published a message of {length} bytes, which is not in "
                f"{_HEAD.size}..{MOST_VALUE_BYTES}"
            )
        message = bytearray(length)
        return found.Irecv([message, MPI.BYTE]), message, source

    def _take(self, key: str, clock: int, source: int, value: bytes) -> None:
        before = self._values.get(key)
        if before is None or before[:2] < (clock, source):
            self._values[key] = (clock, source, value)
