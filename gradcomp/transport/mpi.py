"""The MPI transport uses a communicator of its own among some of the job's processes, through mpi4py.

**Progress.** MPI moves a message only while the process is inside MPI. On one host it does so in pieces of a few
kilobytes, unless the kernel lets it read the other process's memory. So a poll that tests once and then sleeps moves
little. A poll here goes on testing while data moves, which it notices by the time that a test takes: a test that copies
takes several times as long as one that finds nothing. No thread waits inside MPI, where it would take a whole core.

**Messages.** Only sums are collectives of MPI; everything else is one message for each pair of ranks. MPI's own
all-to-alls send a rank's part for itself in pieces through the queues for others, and its all-gathers send unequal
parts in many small rounds, each of which waits for a poll.

**Threads.** MPI is initialised with MPI_THREAD_MULTIPLE. If the program has initialised it with MPI_THREAD_SERIALIZED,
gradcomp's calls share a lock, and the program must not call MPI while gradcomp runs. A lower level raises ConfigError.

**Failure.** A process that is killed ends the job through the launcher. After a TransportError a process waits at exit
until all others of the communicator have reached their exits, so that each can report its error; if one does not, the
process ends the job by MPI_Abort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy.typing as npt

from gradcomp.core.errors import TransportError
from gradcomp.transport.base import Messages, PointToPoint
from gradcomp.transport.mpi_process import FAREWELL_TAG, MpiProcess, mpi_process, reason

#: The largest count and displacement that MPI accepts before version 4.
_LARGEST_COUNT = 2**31 - 1

#: The least number of tests in a poll, and how many of them say nothing about progress because caches are cold.
_TESTS, _COLD_TESTS = 8, 2
#: A test has moved data if it takes this many times as long as one that finds nothing.
_MOVED_FACTOR = 4.0
#: After a test that has moved data, the poll goes on for as long as that test took, because the other rank may need the
#: same time for its part, and at least for this long.
_PATIENCE_SECONDS = 50e-6
#: A poll returns after this time even if data still moves.
_LONGEST_POLL_SECONDS = 2e-3
#: After its start an operation is tested without a pause for the time that its bytes take at the speed of memory, but
#: at most for the second number.
_MEMORY_BYTES_PER_SECOND, _LONGEST_START_SECONDS = 10e9, 500e-6
#: The time that an operation may spend in such polls, fixed and per byte: tests that are slow for another reason must
#: not take up a core.
_SPIN_SECONDS, _SPIN_BYTES_PER_SECOND = 1e-3, 200e6


@dataclass(eq=False)
class _Part:
    """Holds one MPI request of an operation; for a receive, also its source and its length."""

    request: Any
    source: int = -1
    nbytes: int = 0


@dataclass(eq=False)
class _Handle:
    """Tracks an operation and keeps its arrays alive."""

    process: MpiProcess
    parts: list[_Part]
    arrays: tuple[Any, ...]
    spin_seconds: float
    started_until: float

    def poll(self) -> bool:
        with self.process.lock:
            return self._complete() or self._drive()

    def _drive(self) -> bool:
        """Test repeatedly while data moves; return true once the operation is complete."""
        process = self.process
        begin = now = perf_counter()
        moving_until = self.started_until
        tests = 0
        while tests < _TESTS or now < moving_until:
            before = now
            if self._complete():
                return True
            now = perf_counter()
            tests += 1
            took = now - before
            # The value may grow slowly, because a test takes longer while more requests are pending.
            process.idle_seconds = min(took, 1.0001 * process.idle_seconds)
            if took > _MOVED_FACTOR * process.idle_seconds and tests > _COLD_TESTS and self.spin_seconds > 0:
                moving_until = min(now + max(took, _PATIENCE_SECONDS), begin + _LONGEST_POLL_SECONDS)
        self.spin_seconds -= now - begin
        return False

    def _complete(self) -> bool:
        """Return true if all parts are complete. One part is tested at a time, because a test moves all of them."""
        try:
            while self.parts and self._test(self.parts[-1]):
                self.parts.pop()
        except self.process.MPI.Exception as error:
            raise TransportError(f"collective failed: {reason(error)}") from error
        if not self.parts:
            self.arrays = ()
        return not self.parts

    def _test(self, part: _Part) -> bool:
        if part.source < 0:
            return bool(part.request.Test())
        MPI = self.process.MPI
        status = MPI.Status()
        try:
            if not part.request.Test(status):
                return False
        except MPI.Exception as error:
            raise TransportError(f"the message from rank {part.source} failed: {reason(error)}") from error
        received = status.Get_count(MPI.BYTE)
        if received not in (part.nbytes, MPI.UNDEFINED):
            raise TransportError(f"rank {part.source} sent {received} bytes, {part.nbytes} were expected")
        return True


class MpiTransport(PointToPoint):
    """Runs collectives and messages of MPI among some processes; its construction is collective over them.

    Args:
        ranks: The ranks in MPI_COMM_WORLD, in the order that they have in the transport; None for all.
        timeout_seconds: The time within which all of them must construct it.
        world: The number of processes that the launcher has started, to compare with that of MPI_COMM_WORLD.

    Raises:
        ConfigError: MPI is missing, sees another number of processes than the launcher, or allows calls from one
            thread only.
        TransportError: Not all ranks came in time.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, timeout_seconds: float = 600.0, *, world: int | None = None
    ) -> None:
        self._process = mpi_process(world)
        self._comm = self._process.communicator(ranks, timeout_seconds)
        self.rank, self.size = self._comm.rank, self._comm.size
        self._exchanges = 0
        self._closed = False

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle:
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        MPI = self._process.MPI

        def issue() -> list[_Part]:
            return [_Part(self._comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM))]

        return self._issue(issue, len(array), array.nbytes, array)

    def exchange(self, sends: Messages, recvs: Messages) -> _Handle:
        self.bytes_sent += sum(len(array) for _, array in sends)
        BYTE = self._process.MPI.BYTE
        tag = self._exchanges % FAREWELL_TAG
        self._exchanges += 1

        def issue() -> list[_Part]:
            incoming = [
                _Part(self._comm.Irecv([array, BYTE], source, tag), source, len(array))
                for source, array in recvs
            ]
            return [_Part(self._comm.Isend([array, BYTE], to, tag)) for to, array in sends] + incoming

        lengths = [len(array) for _, array in (*sends, *recvs)]
        return self._issue(issue, max(lengths, default=0), sum(lengths), sends, recvs)

    def _issue(self, call: Callable[[], list[_Part]], count: int, nbytes: int, *arrays: Any) -> _Handle:
        MPI = self._process.MPI
        if count > _LARGEST_COUNT and MPI.VERSION < 4:
            raise TransportError(
                f"an operation on {count} elements: MPI {MPI.VERSION}.{MPI.SUBVERSION} counts to 2^31 - 1; "
                "use an MPI of version 4, or smaller slices"
            )
        try:
            with self._process.lock:
                parts = call()
        except MPI.Exception as error:
            raise TransportError(f"collective failed: {reason(error)}") from error
        start = min(nbytes / _MEMORY_BYTES_PER_SECOND, _LONGEST_START_SECONDS)
        spin = _SPIN_SECONDS + nbytes / _SPIN_BYTES_PER_SECOND
        return _Handle(self._process, parts, arrays, spin, perf_counter() + start)

    def abandon(self) -> None:
        """Give the communicator up; the process will wait for the other ranks at exit, as the module describes."""
        if not self._closed:
            self._closed = True
            self._process.abandoned.append(self._comm)

    def close(self) -> None:
        """Free the communicator, unless it was abandoned or MPI has ended. The call is collective."""
        if not self._closed:
            self._closed = True
            if not self._process.MPI.Is_finalized():
                with self._process.lock:
                    self._comm.Free()
